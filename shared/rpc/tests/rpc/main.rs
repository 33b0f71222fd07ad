//! The contracts on the wire.

mod errors;
mod golden;
mod hostile_tokens;
mod service_config;
