//! Load generator for any REAPI server: one thread, latencies by percentile, and the server's own account of itself.
//!
//! `bench/README.md` has the method and the commands.

mod client;
mod drive;
mod flags;
mod http;
mod job;
mod measure;
mod payload;
#[cfg(test)]
mod peer;
mod probe;
mod process;
mod report;
mod scenario;
mod stamped;
mod supply;
mod target;
mod verify;
mod wire;

use std::process::ExitCode;
use std::rc::Rc;

use clap::Parser;

fn main() -> ExitCode {
    let flags = match flags::Flags::parse().completed() {
        Ok(flags) => flags,
        Err(text) => {
            eprintln!("load: {text}");
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("load: cannot start a runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = tokio::task::LocalSet::new().block_on(&runtime, drive::run(Rc::new(flags)));
    match outcome {
        Ok(0) => ExitCode::SUCCESS,
        Ok(errors) => {
            eprintln!("load: {errors} calls or checks failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("load: {error}");
            ExitCode::FAILURE
        }
    }
}
