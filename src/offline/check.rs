//! `ringcas check` and `ringcas stats`: a survey of all shards, and its report.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::crew::{self, Progress, seconds_left};
use super::findings::{Broken, Findings, What};
use super::flags::{Check, Place, Stats};
use super::report::{self, Subject};
use super::survey::{Depth, Surveyor};
use super::{Failure, Verdict, print};
use crate::limits::DISK_ALIGN;
use crate::pure::segment::SegmentHeader;
use crate::pure::shard_map::ShardId;
use crate::rt;
use crate::rt::join::map_bounded;
use crate::rt::signal::Shutdown;
use crate::shard::geometry::{self, Volume};

/// Shards that a core works on at a time, so that it computes while its reads are on their way.
const SHARDS_AT_A_TIME: usize = 4;

pub fn check(flags: &Check) -> Result<Verdict, Failure> {
    let (subject, findings) = survey(&flags.place, Depth::Content, flags.repair)?;
    let text =
        if flags.json { report::check_json(&subject, &findings) } else { report::check_text(&subject, &findings) };
    print(&text)?;
    Ok(if findings.broken_total() == findings.repaired { Verdict::Fine } else { Verdict::Flawed })
}

pub fn stats(flags: &Stats) -> Result<Verdict, Failure> {
    let (subject, findings) = survey(&flags.place, Depth::Headers, false)?;
    let text =
        if flags.json { report::stats_json(&subject, &findings) } else { report::stats_text(&subject, &findings) };
    print(&text)?;
    Ok(Verdict::Fine)
}

fn survey(place: &Place, depth: Depth, repairs: bool) -> Result<(Subject, Findings), Failure> {
    let begun = rt::time::now();
    let plan = place.cores()?;
    let volume = geometry::open_as_is(&place.dir()?)?;
    let mut all = supers(&volume, repairs)?;
    let leased = volume.headers().iter().flatten().count() as u64;
    let progress = Arc::new(Progress::default());
    progress.set_total(leased * u64::from(volume.layout().segment_len));
    let (cores, stop) = (plan.len(), Shutdown::new());
    let parts = crew::run(&plan, &stop, &progress, line, |core| {
        let (volume, progress, stop) = (volume.clone(), progress.clone(), stop.clone());
        move || async move {
            let surveyor = Rc::new(Surveyor::open(&volume, depth, repairs, progress).await?);
            part(&volume, &surveyor, core, cores, &stop, repairs).await
        }
    })?;
    for part in parts {
        all.add(part?);
    }
    let subject = Subject {
        dir: volume.dir().to_owned(),
        shards: volume.shards(),
        segments: volume.segment_count(),
        layout: volume.layout(),
        bytes: volume.allocated_bytes(),
        took: begun.elapsed(),
    };
    Ok((subject, all))
}

/// One core's share: the shards and segments whose number leaves its own when divided by the number of cores.
async fn part(
    volume: &Volume,
    surveyor: &Rc<Surveyor>,
    core: usize,
    cores: usize,
    stop: &Shutdown,
    repairs: bool,
) -> Result<Findings, Failure> {
    let mut all = Findings::default();
    for segment in (core as u32..volume.segment_count()).step_by(cores) {
        if volume.headers()[segment as usize].is_none() {
            all.add(surveyor.headless(segment).await?);
        }
    }
    let mut segments: Vec<Vec<SegmentHeader>> = vec![Vec::new(); usize::from(volume.shards())];
    for header in volume.headers().iter().flatten() {
        segments[usize::from(header.shard.0)].push(*header);
    }
    let own = segments.into_iter().zip(0..).skip(core).step_by(cores).collect();
    let found = map_bounded(own, SHARDS_AT_A_TIME, |(segments, shard)| async move {
        if stop.is_triggered() {
            return Err(Failure::Stopped);
        }
        Ok(surveyor.shard(ShardId(shard), segments).await?)
    });
    for found in found.await {
        all.add(found?);
    }
    if repairs && all.repaired > 0 {
        surveyor.sync().await?;
    }
    Ok(all)
}

/// Looks at the superblock, and mends it if that is asked for.
fn supers(volume: &Volume, repairs: bool) -> Result<Findings, Failure> {
    let mut findings = Findings::default();
    for (copy, _) in volume.whole_supers()?.iter().enumerate().filter(|(_, whole)| !**whole) {
        let position = (copy * DISK_ALIGN) as u64;
        findings.note_broken(Broken { what: What::Super, position, key: None });
        findings.repaired += u64::from(repairs);
    }
    if repairs {
        volume.mend_supers()?;
    }
    Ok(findings)
}

fn line(progress: &Progress, elapsed: Duration) -> String {
    let (done, total, broken) = progress.now();
    let percent = (100 * done).checked_div(total).unwrap_or(100);
    let left = seconds_left(done, total, elapsed).map_or(String::new(), |left| format!(", {left} s left"));
    format!("{} of {} ({percent} %), {broken} broken{left}", report::size(done), report::size(total))
}
