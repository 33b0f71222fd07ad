//! Placement: the choice of a worker for a request, or the reasons why none is chosen.
//!
//! All filtering and ranking of workers is here. [`refusals`] returns the reasons against a worker
//! (`feasibility.rs`). A [`Chain`] of strategies ranks the feasible workers (`scoring.rs`).
//! [`Index::choose`] picks a best worker, at random among equals. All of it is pure. The
//! transaction that grants a lease calls [`refusals`] again on the locked row of the worker
//! ([`crate::commit`]).
//!
//! The [`Index`] does not check each worker. Workers that differ only in load form a class, which
//! is checked once and sorts its workers by cost. The tests compare the index with a plain
//! implementation that checks every worker.

mod feasibility;
mod index;
mod refusal;
mod scoring;
#[cfg(test)]
pub(crate) mod tests;
mod throughput;
mod types;

pub(crate) use feasibility::{refusals, standing_refusals};
pub(crate) use index::explain::{Answer, DetailFilter, Group, Opinion, Outlook, Ranking};
pub(crate) use index::reservations::Part;
pub(crate) use index::{Choice, DecidedBy, Index, Placement, WAITS_FOR};
pub(crate) use refusal::{CODES, Refusal, Refusals};
#[cfg(test)]
pub(crate) use refusal::{Resource, Shortage};
pub use scoring::{Chain, Chains, ParseChainError, Strategy};
pub(crate) use throughput::Pace;
pub(crate) use types::{
    Demand, Desired, FailedWorker, Failing, Kind, Load, Location, OnlyWorker, Process, Purpose, Resources,
    Shape, State, Trust, Worker,
};
