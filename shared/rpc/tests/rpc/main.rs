//! Tests of the contracts on the wire.

mod contract;
mod errors;
mod golden;
mod hostile_tokens;
mod service_config;
