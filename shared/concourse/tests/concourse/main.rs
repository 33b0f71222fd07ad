//! Tests of the Garden and Baggageclaim clients over the wire.

mod baggageclaim;
mod garden_client;
mod garden_wire;
mod hostile_answers;
mod hostile_archives;
