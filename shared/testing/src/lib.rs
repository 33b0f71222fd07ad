//! For tests: what every implementation of a trait of ours is held to.

pub mod conformance;
