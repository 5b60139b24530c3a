//! From the command line to running cores, and back to an exit code.

/// Runs the server until it is told to stop.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
