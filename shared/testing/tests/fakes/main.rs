//! Tests of the fake worker and the simulated Concourse servers.

mod baggageclaim_wire;
mod fake;
