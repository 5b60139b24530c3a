//! Calendar time as S3 writes it: from and to seconds since 1970, UTC. No leap seconds, as in POSIX.

/// Year, month, day, hour, minute, second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Civil {
    pub year: u32,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
}

const DAY_S: u64 = 86_400;
const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

impl Civil {
    /// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
    pub fn from_unix(seconds: u64) -> Self {
        let (days, rest) = (seconds / DAY_S + 719_468, seconds % DAY_S);
        let (era, day_of_era) = (days / 146_097, days % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        Self {
            year: (year_of_era + era * 400 + u64::from(month <= 2)) as u32,
            month: month as u32,
            day: (day_of_year - (153 * shifted + 2) / 5 + 1) as u32,
            hour: (rest / 3_600) as u32,
            minute: (rest / 60 % 60) as u32,
            second: (rest % 60) as u32,
        }
    }

    /// Seconds since 1970; `None` before, and for what is no date.
    pub fn to_unix(self) -> Option<u64> {
        let Self { year, month, day, hour, minute, second } = self;
        if !(1970..10_000).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
            return None;
        }
        if hour > 23 || minute > 59 || second > 60 {
            return None;
        }
        let year = u64::from(year) - u64::from(month <= 2);
        let (era, year_of_era) = (year / 400, year % 400);
        let shifted = u64::from(if month > 2 { month - 3 } else { month + 9 });
        let day_of_year = (153 * shifted + 2) / 5 + u64::from(day) - 1;
        let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
        let days = (era * 146_097 + day_of_era).checked_sub(719_468)?;
        Some(days * DAY_S + u64::from(hour) * 3_600 + u64::from(minute) * 60 + u64::from(second))
    }

    /// `20130524T000000Z`, as signatures have it.
    pub fn basic(self) -> String {
        let Self { year, month, day, hour, minute, second } = self;
        format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
    }
}

/// Seconds since 1970 of a date in HTTP's preferred form, `Sun, 06 Nov 1994 08:49:37 GMT`.
///
/// Source: RFC 9110, 5.6.7 (IMF-fixdate).
pub fn parse_http_date(text: &str) -> Option<u64> {
    let mut parts = text.split_once(", ")?.1.split(' ');
    let day = parts.next()?.parse().ok()?;
    let name = parts.next()?;
    let month = MONTHS.iter().position(|month| *month == name)? as u32 + 1;
    let year = parts.next()?.parse().ok()?;
    let mut clock = parts.next()?.splitn(3, ':').map(|part| part.parse().ok());
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    (parts.next()? == "GMT").then_some(())?;
    Civil { year, month, day, hour, minute, second }.to_unix()
}

/// Seconds since 1970 of `2026-11-30T02:40:00Z`; fractions of a second are dropped.
///
/// Source: RFC 3339, as AWS writes expirations: always UTC.
pub fn parse_rfc3339(text: &str) -> Option<u64> {
    let number = |range: std::ops::Range<usize>| text.get(range)?.parse::<u32>().ok();
    let is_utc = text.ends_with('Z') || text.ends_with("+00:00");
    let marks = [(4, "-"), (7, "-"), (10, "T"), (13, ":"), (16, ":")];
    if !is_utc || !marks.iter().all(|&(at, mark)| text.get(at..at + 1) == Some(mark)) {
        return None;
    }
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    let (hour, minute, second) = (number(11..13)?, number(14..16)?, number(17..19)?);
    Civil { year, month, day, hour, minute, second }.to_unix()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: both directions agree on every day of four centuries. Method: count days and compare the calendar's own rule.
    #[test]
    fn every_day_of_four_centuries() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for days in 0..146_097 {
            let civil = Civil::from_unix(days * DAY_S + 3_723);
            assert_eq!(civil, Civil { year, month, day, hour: 1, minute: 2, second: 3 });
            assert_eq!(civil.to_unix(), Some(days * DAY_S + 3_723));
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month as usize - 1];
            day += 1;
            if day > length {
                (day, month) = (1, month + 1);
            }
            if month > 12 {
                (month, year) = (1, year + 1);
            }
        }
    }

    /// Goal: the forms are those of the RFCs, and nonsense is no date. Method: their examples, and broken ones.
    #[test]
    fn forms() {
        assert_eq!(parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(parse_rfc3339("1994-11-06T08:49:37Z"), Some(784_111_777));
        assert_eq!(parse_rfc3339("1994-11-06T08:49:37.123456Z"), Some(784_111_777));
        assert_eq!(Civil::from_unix(1_369_353_600).basic(), "20130524T000000Z");
        for text in ["", "Sun, 06 Nov 1994 08:49:37", "Sun, 06 Foo 1994 08:49:37 GMT", "Sun, 06 Nov 1994 24:49:37 GMT"]
        {
            assert_eq!(parse_http_date(text), None, "{text}");
        }
        for text in ["", "1994-11-06", "1994-13-06T08:49:37Z", "1994-11-06T08:49:37+02:00", "é994-11-06T08:49:37Z"] {
            assert_eq!(parse_rfc3339(text), None, "{text}");
        }
    }
}
