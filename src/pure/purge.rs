//! Purges of action results by who stored them and when: what a request asks for, what a record and an object say of
//! their origin, and the purges that stand, so that a backend does not bring back what was purged.

use twox_hash::xxhash3_64::Hasher;

use super::civil_time::parse_rfc3339;
use super::http_cache::decode_percent;
use crate::limits::PURGES_STANDING_MAX;

/// Stands for an instance name. Two names may share a tag, once in four billion: a purge then takes more than was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct InstanceTag(pub u32);

impl InstanceTag {
    /// Of results that came without one, such as imported ones.
    pub const UNKNOWN: Self = Self(0);

    /// The empty name is one like others.
    pub fn of(instance: &str) -> Self {
        Self((Hasher::oneshot(instance.as_bytes()) as u32).max(1))
    }
}

/// Who stored something, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Origin {
    /// Seconds since 1970, by this machine's clock; 0 for unknown.
    pub stored_s: u32,
    pub instance: InstanceTag,
}

impl Origin {
    pub fn new(unix_seconds: u64, instance: InstanceTag) -> Self {
        Self { stored_s: u32::try_from(unix_seconds).unwrap_or(u32::MAX), instance }
    }

    /// As an object's metadata says it: `<stored_s>-<tag in hex>`.
    pub fn to_text(self) -> String {
        format!("{}-{:08x}", self.stored_s, self.instance.0)
    }

    /// `None` for what `to_text` does not write.
    pub fn parse(text: &str) -> Option<Self> {
        let (stored, tag) = text.split_once('-')?;
        Some(Self { stored_s: stored.parse().ok()?, instance: InstanceTag(u32::from_str_radix(tag, 16).ok()?) })
    }
}

/// Which action results a purge takes: those that fit all that is given.
///
/// What is not known of a result fits: a purge rather takes too much than leaves what it was meant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Which {
    pub instance: Option<InstanceTag>,
    /// Stored at this second or later.
    pub since_s: Option<u32>,
    /// Stored before this second.
    pub before_s: Option<u32>,
}

/// A request that says what it wants in a way that is no good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct BadField {
    pub field: String,
    pub problem: &'static str,
}

const FIELDS: &str = "is not known: use instance, written_since, written_before or all";
const TIME: &str =
    "must be a time such as 2026-11-30T10:00:00Z, seconds since 1970, or a time ago such as 90m, 2h or 7d";

impl Which {
    pub fn covers(&self, origin: Origin) -> bool {
        let Origin { stored_s, instance } = origin;
        let by_instance = self.instance.is_none_or(|wanted| instance == wanted || instance == InstanceTag::UNKNOWN);
        let by_time = stored_s == 0
            || self.since_s.is_none_or(|since| stored_s >= since)
                && self.before_s.is_none_or(|before| stored_s < before);
        by_instance && by_time
    }

    /// Whether all that `other` covers is covered here.
    fn includes(&self, other: &Self) -> bool {
        (self.instance.is_none() || self.instance == other.instance)
            && self.since_s.is_none_or(|since| other.since_s.is_some_and(|theirs| theirs >= since))
            && self.before_s.is_none_or(|before| other.before_s.is_some_and(|theirs| theirs <= before))
    }

    /// What either covers, and perhaps more.
    fn hull(&self, other: &Self) -> Self {
        let both = |a: Option<u32>, b: Option<u32>, pick: fn(u32, u32) -> u32| Some(pick(a?, b?));
        Self {
            instance: self.instance.filter(|_| self.instance == other.instance),
            since_s: both(self.since_s, other.since_s, u32::min),
            before_s: both(self.before_s, other.before_s, u32::max),
        }
    }

    /// Reads the query of a request that comes at `now_s`: `instance=<name>`, `written_since=<time>`,
    /// `written_before=<time>`, or `all=true`.
    pub fn parse_query(query: &str, now_s: u64) -> Result<Self, BadField> {
        let mut which = Self::default();
        let mut all = false;
        let mut seen: Vec<String> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (field, value) = pair.split_once('=').unwrap_or((pair, ""));
            let bad = |problem| BadField { field: field.chars().take(64).collect(), problem };
            let value =
                decode_percent(value).ok_or_else(|| bad("has a % that two digits do not follow, or is no UTF-8"))?;
            if seen.iter().any(|known| known == field) {
                return Err(bad("stands there twice"));
            }
            let time = || match parse_time(&value, now_s) {
                None => Err(bad(TIME)),
                Some(at) if at > now_s => Err(bad("lies in the future")),
                Some(at) => Ok(Some(at as u32)),
            };
            match field {
                "instance" => which.instance = Some(InstanceTag::of(&value)),
                "written_since" => which.since_s = time()?,
                "written_before" => which.before_s = time()?,
                "all" if value == "true" => all = true,
                "all" => return Err(bad("must be true")),
                _ => return Err(bad(FIELDS)),
            }
            seen.push(field.to_owned());
        }
        let bad = |field: &str, problem| BadField { field: field.to_owned(), problem };
        if all == (which != Self::default()) {
            return Err(bad(
                "all",
                "give instance, written_since or written_before, or all=true alone for every result",
            ));
        }
        if which.since_s.is_some_and(|since| which.before_s.is_some_and(|before| since >= before)) {
            return Err(bad("written_before", "must be later than written_since"));
        }
        Ok(which)
    }
}

/// Seconds since 1970.
fn parse_time(text: &str, now_s: u64) -> Option<u64> {
    if let Some(at) = parse_rfc3339(text) {
        return Some(at);
    }
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    if is_number(text) {
        return text.parse().ok();
    }
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let unit_s = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return None,
    };
    let ago = is_number(number).then(|| number.parse::<u64>().ok()?.checked_mul(unit_s))??;
    now_s.checked_sub(ago)
}

/// A purge that was made, and stands: an object of a backend that it covers is not there any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    pub which: Which,
    /// When it was made: what was stored later is not meant.
    pub at_s: u32,
}

impl Standing {
    fn covers(&self, origin: Origin) -> bool {
        self.which.covers(origin) && origin.stored_s <= self.at_s.saturating_add(SLACK_S)
    }
}

/// What stores round times to, and what their clocks may run apart from ours between two answers.
const SLACK_S: u32 = 2;
/// All purges that stand, the oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Purges(Vec<Standing>);

const TITLE: &str = "ringcas purges, version 1: made at, stored since, stored before, instance";

impl Purges {
    /// Adds one that is made now.
    pub fn add(&mut self, which: Which, now_s: u64) {
        let added = Standing { which, at_s: u32::try_from(now_s).unwrap_or(u32::MAX) };
        self.0.retain(|old| !(which.includes(&old.which) && added.at_s >= old.at_s));
        self.0.push(added);
        if self.0.len() > PURGES_STANDING_MAX {
            let (first, second) = (self.0.remove(0), self.0.remove(0));
            let merged = Standing { which: first.which.hull(&second.which), at_s: first.at_s.max(second.at_s) };
            self.0.insert(0, merged);
        }
    }

    /// Whether an object of this origin was purged.
    pub fn cover(&self, origin: Origin) -> bool {
        self.0.iter().any(|standing| standing.covers(origin))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// As the file has them: a title, then a line for each, `-` for what is not given.
    pub fn to_text(&self) -> String {
        let number = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
        let line = |Standing { which, at_s }: &Standing| {
            let instance = which.instance.map_or("-".to_owned(), |tag| format!("{:08x}", tag.0));
            format!("{at_s} {} {} {instance}\n", number(which.since_s), number(which.before_s))
        };
        format!("{TITLE}\n{}", self.0.iter().map(line).collect::<String>())
    }

    /// `None` for what `to_text` does not write.
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        (lines.next()? == TITLE).then_some(())?;
        fn given<T>(word: &str, parse: impl Fn(&str) -> Option<T>) -> Option<Option<T>> {
            if word == "-" { Some(None) } else { parse(word).map(Some) }
        }
        let standing = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let [at, since, before, instance] = words[..] else { return None };
            let number = |word: &str| word.parse::<u32>().ok();
            let which = Which {
                since_s: given(since, number)?,
                before_s: given(before, number)?,
                instance: given(instance, |word| u32::from_str_radix(word, 16).ok().map(InstanceTag))?,
            };
            Some(Standing { which, at_s: at.parse().ok()? })
        };
        lines.map(standing).collect::<Option<Vec<_>>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_796_000_000;

    fn origin(stored_s: u32, instance: &str) -> Origin {
        Origin { stored_s, instance: InstanceTag::of(instance) }
    }

    /// Goal: each field of a query is read, and what is wrong is named by its field. Method: a query of each kind.
    #[test]
    fn queries() {
        let parse = |query: &str| Which::parse_query(query, NOW);
        let ago = |seconds: u64| Some((NOW - seconds) as u32);
        let none = Which::default();
        assert_eq!(parse("all=true"), Ok(none));
        let main = Which { instance: Some(InstanceTag::of("main/x")), ..none };
        assert_eq!((parse("instance=main%2Fx"), parse("instance=main/x&")), (Ok(main), Ok(main)));
        assert_eq!(parse("instance="), Ok(Which { instance: Some(InstanceTag::of("")), ..none }));
        for (text, at) in [("90m", ago(5400)), ("2h", ago(7200)), ("7d", ago(604_800)), ("5s", ago(5))] {
            assert_eq!(parse(&format!("written_since={text}")), Ok(Which { since_s: at, ..none }), "{text}");
        }
        let both = Which { since_s: Some(1_795_000_000), before_s: Some(1_795_910_400), ..none };
        assert_eq!(parse("written_since=1795000000&written_before=2026-11-29T00:00:00Z"), Ok(both));
        for (query, field) in [
            ("", "all"),
            ("all=true&instance=a", "all"),
            ("all=yes", "all"),
            ("written_since=yesterday", "written_since"),
            ("written_since=", "written_since"),
            ("written_since=9999999999", "written_since"),
            ("written_before=2027-01-01T00:00:00Z", "written_before"),
            ("written_before=99999999999999999999d", "written_before"),
            ("written_since=1h&written_before=1h", "written_before"),
            ("instance=a&instance=b", "instance"),
            ("instance=%zz", "instance"),
            ("digest=1", "digest"),
        ] {
            assert_eq!(parse(query).map_err(|error| error.field), Err(field.to_owned()), "{query}");
        }
    }

    /// Goal: a purge takes what fits all that it says, and what is not known. Method: origins around each bound.
    #[test]
    fn what_is_covered() {
        let which = Which { instance: Some(InstanceTag::of("a")), since_s: Some(100), before_s: Some(200) };
        for (stored_s, covered) in [(0, true), (99, false), (100, true), (199, true), (200, false)] {
            assert_eq!(which.covers(origin(stored_s, "a")), covered, "{stored_s}");
            assert!(!which.covers(origin(stored_s, "b")));
            assert_eq!(which.covers(Origin { stored_s, instance: InstanceTag::UNKNOWN }), covered, "{stored_s}");
        }
        assert!(Which::default().covers(origin(7, "a")) && InstanceTag::of("") != InstanceTag::UNKNOWN);
    }

    /// Goal: a standing purge covers what was stored up to when it was made, and nothing later; more purges than are kept
    /// cover all the same; the file says them all. Method: twice as many as are kept, each of its own time and instance.
    #[test]
    fn purges_that_stand() {
        let mut purges = Purges::default();
        let made = |n: u32| 10_000 + 100 * n;
        for n in 0..2 * PURGES_STANDING_MAX as u32 {
            let which =
                Which { since_s: Some(made(n) - 50), before_s: None, instance: Some(InstanceTag::of(&n.to_string())) };
            purges.add(which, u64::from(made(n)));
            for m in 0..=n {
                assert!(purges.cover(origin(made(m) - 10, &m.to_string())), "{m} of {n}");
            }
            assert!(!purges.cover(origin(made(n) + 10, &n.to_string())) && purges.len() <= PURGES_STANDING_MAX);
            assert_eq!(Purges::parse(&purges.to_text()).as_ref(), Some(&purges));
        }
        purges.add(Which::default(), 1_000_000);
        assert_eq!(purges.len(), 1, "it covers all others");
        assert!(purges.cover(Origin::default()) && !purges.cover(origin(1_000_010, "x")));
        for bad in ["", "something else\n", &format!("{TITLE}\n1 - -\n"), &format!("{TITLE}\n1 - x -\n")] {
            assert_eq!(Purges::parse(bad), None, "{bad}");
        }
    }

    /// Goal: an object's metadata brings back what was written. Method: there and back; other texts.
    #[test]
    fn origins_as_text() {
        let origin = origin(1_796_000_000, "main");
        assert_eq!(Origin::parse(&origin.to_text()), Some(origin));
        for bad in ["", "1", "1-", "-1", "x-00", "1-xyz"] {
            assert_eq!(Origin::parse(bad), None, "{bad}");
        }
    }
}
