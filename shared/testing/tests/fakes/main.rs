//! The fakes, held to what the real ones do.

mod baggageclaim_wire;
mod fake;
