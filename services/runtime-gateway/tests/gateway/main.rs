//! Tests of runtimes, and of gateways with real runtimes.

mod garden;
mod host;
mod several;
