//! Gateways with real runtimes, and the runtimes themselves, held to what every runtime is held to.

mod garden;
mod host;
mod several;
