//! The configuration: flags, each also an environment variable.
