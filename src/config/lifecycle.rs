//! When the server takes over, stops by itself and lets go of connections.

use std::time::Duration;

use clap::Args;

use super::LIFE;
use super::values::duration;
use crate::limits;

/// Flags of the server's life and its connections'.
#[derive(Args, Debug)]
#[command(rename_all = "snake_case", next_help_heading = LIFE)]
pub struct LifecycleFlags {
    /// Mode of the files of unix sockets, in octal, such as 0660. Default: what the umask leaves.
    #[arg(long, value_parser = mode)]
    unix_socket_mode: Option<u32>,
    /// Stop, as after SIGTERM, when no request has come or been in flight for so long, such as 1h; 0 for never.
    #[arg(long, default_value = "0", value_parser = duration)]
    idle_timeout: Duration,
    /// Ask a gRPC client to connect anew when its connection is so old (a tenth more or less), such as 1h, so that
    /// connections spread over servers that came later; 0 for never.
    #[arg(long, default_value = "0", value_parser = duration)]
    grpc_max_connection_age: Duration,
    /// How long the calls of such a connection may take to end before it is cut; 0 for as long as they want.
    #[arg(long, default_value = "0", value_parser = duration)]
    grpc_max_connection_age_grace: Duration,
    /// Take over from the server that runs on the same --dir: its listening sockets, then its cache. It finishes what is
    /// in flight; nobody is refused meanwhile. Without such a server this is a start like any other.
    #[arg(long)]
    take_over: bool,
}

/// The checked settings.
#[derive(Debug, Clone, Default)]
pub struct Lifecycle {
    pub unix_socket_mode: Option<u32>,
    pub idle_timeout: Option<Duration>,
    pub max_connection_age: Option<Duration>,
    /// From then on.
    pub max_connection_age_grace: Option<Duration>,
    pub take_over: bool,
}

impl LifecycleFlags {
    pub fn resolve(self) -> Lifecycle {
        let given = |duration: Duration| (!duration.is_zero()).then_some(duration);
        Lifecycle {
            unix_socket_mode: self.unix_socket_mode,
            // Why a minimum: activity is looked at that often.
            idle_timeout: given(self.idle_timeout).map(|idle| idle.max(limits::IDLE_LOOK)),
            max_connection_age: given(self.grpc_max_connection_age),
            max_connection_age_grace: given(self.grpc_max_connection_age_grace),
            take_over: self.take_over,
        }
    }
}

/// Permission bits in octal.
fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not a mode in octal, such as 0660".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: modes are octal and nothing but permissions. Method: one example for each kind.
    #[test]
    fn modes() {
        assert_eq!(mode("0660"), Ok(0o660));
        assert_eq!(mode("600"), Ok(0o600));
        assert!(mode("0980").is_err() && mode("1777").is_err() && mode("").is_err() && mode("rw").is_err());
    }
}
