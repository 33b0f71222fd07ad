//! Placement: which worker, or why none.
//!
//! Nothing else filters or compares workers. [`refusals`] says what speaks against a worker
//! (`feasibility.rs`), a [`Chain`] of strategies compares those that would do (`scoring.rs`), and
//! [`Index::choose`] picks one of the best, by lot if several are equal. All of it is pure. The
//! transaction that grants a lease asks [`refusals`] again of the worker's row, which it has locked
//! ([`crate::commit`]).
//!
//! The [`Index`] answers without a look at each worker: workers that differ in nothing but their
//! load are a class, which is judged once, and lie in it sorted by what they cost. Its tests compare
//! it with a plain restatement that looks at every worker.

mod feasibility;
mod index;
mod refusal;
mod scoring;
#[cfg(test)]
pub(crate) mod tests;
mod throughput;
mod types;

pub(crate) use feasibility::{refusals, standing_refusals};
pub(crate) use index::explain::{Group, Opinion, Outlook, Says, Standing, Tell};
pub(crate) use index::reservations::Part;
pub(crate) use index::{Choice, DecidedBy, Index, Placement, WAITS_FOR};
pub(crate) use refusal::{CODES, Refusal, Refusals};
#[cfg(test)]
pub(crate) use refusal::{Resource, Shortage};
pub use scoring::{Chain, Chains, ParseChainError, Strategy};
pub(crate) use throughput::Pace;
pub(crate) use types::{
    Demand, Desired, FailedThere, Failing, Kind, Load, Location, Process, Purpose, Resources, Shape, State,
    Trust, Worker,
};
