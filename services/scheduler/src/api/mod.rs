//! The three gRPC services: handlers parse, call [`crate::app::App`] and convert the answer. Only
//! this module creates a `Status`.

mod convert;
mod placements;
mod watch_workers;
mod worker_stream;
mod workers;
mod workloads;

use rpc::page::Page;
use rpc::{Reason, parse_team};
use sea_orm::DbErr;
use tonic::Status;
use uuid::Uuid;

use crate::app::{SettleLeaseError, TicketError};
use crate::insight::explain::ExplainError;
use crate::leases::{LeaseError, RenewError, UseError};
use crate::lifecycle::departure::{self, RegistryError};
use crate::placement::Refusals;
use crate::scheduling::{PlaceError, SubmitError};
use crate::workers::SessionError;
use crate::workloads::{AttemptError, OtherSpec, WorkloadError};

pub(crate) use placements::PlacementsService;
pub(crate) use workers::WorkersService;
pub(crate) use workloads::WorkloadsService;

/// Name of this service in error details.
const SERVICE: &str = "gantry.scheduler";

/// Maximum number of workers in the details of an error. Details travel in headers, which are
/// limited.
const MAX_NAMED: usize = 20;

/// Maximum number of bytes of a worker's name, and of its reason.
const MAX_NAMED_BYTES: usize = 500;

/// Maximum number of bytes of all reasons. Headers have room for 16 KiB, including encoding and the
/// rest of the error.
const MAX_DETAILS_BYTES: usize = 8 << 10;

/// Parses the team of a list. `None`: all teams.
fn team_or_all(team: &str) -> Result<Option<String>, Status> {
    if team.is_empty() { Ok(None) } else { parse_team("team", team.to_owned()).map(Some) }
}

/// Builds a page from the query result, which contains one extra row if there are more. Also
/// returns the token of the next page, or an empty one.
fn end_page<T, M: rpc::Message>(
    page: &Page,
    mut found: Vec<T>,
    id: impl Fn(&T) -> Uuid,
    shown: impl Fn(T) -> M,
) -> (Vec<M>, String) {
    let size = usize::try_from(page.size).unwrap_or(usize::MAX);
    let more = found.len() > size;
    found.truncate(size);
    page.end(found.into_iter().map(|found| (id(&found), shown(found))), more)
}

impl IntoStatus for SubmitError {
    fn status(self) -> Status {
        match self {
            Self::Exists(OtherSpec(id)) | Self::LeaseId(id) => {
                about_workload(Reason::WorkloadExists, &self.to_string(), id)
            }
            Self::NoCompatibleWorker(refusals) => incompatible(&refusals),
            Self::UnknownWorker(worker) => unknown_worker(&worker),
            Self::NotPinned(refusal) => not_pinned(refusal, Reason::WorkloadExists),
            Self::TooManyWaiting(full) => {
                let about = [("team", full.team.clone())];
                Reason::TeamQueueFull.status_about(SERVICE, full.to_string(), about)
            }
            Self::Undecided => undecided(),
            Self::Stopping => stopping(),
            Self::Database(error) => database("accept a workload", &error),
        }
    }
}

impl IntoStatus for WorkloadError {
    fn status(self) -> Status {
        match self {
            Self::NotFound(id) => about_workload(Reason::WorkloadNotFound, &self.to_string(), id),
            Self::NoMatch(_) => Reason::WorkloadNotFound.status(SERVICE, self.to_string()),
            Self::Database(error) => database("read a workload", &error),
        }
    }
}

impl IntoStatus for ExplainError {
    fn status(self) -> Status {
        match self {
            Self::NotFound(id) => about_workload(Reason::WorkloadNotFound, &self.to_string(), id),
            Self::NotQueued(id, state) => {
                let state = convert::workload_state(state).as_str_name().to_owned();
                let about = [("workload_id", id.to_string()), ("state", state)];
                Reason::WorkloadNotQueued.status_about(SERVICE, self.to_string(), about)
            }
            Self::InputUnavailable(artifact) => input_unavailable(&self.to_string(), artifact),
            Self::CacheUnavailable(cache) => cache_unavailable(&self.to_string(), cache),
            Self::UnknownWorker(worker) => unknown_worker(&worker),
            Self::NotLocated(refusal) => rpc::unavailable(SERVICE, "locate the inputs", &refusal),
            Self::Database(error) => database("explain a placement", &error),
        }
    }
}

impl IntoStatus for AttemptError {
    fn status(self) -> Status {
        match self {
            Self::LeaseLost => Reason::LeaseLost.status(SERVICE, self.to_string()),
            Self::Database(error) => database("record the progress of an attempt", &error),
        }
    }
}

impl IntoStatus for SessionError {
    fn status(self) -> Status {
        match self {
            Self::Stale => Reason::StaleSession.status(SERVICE, self.to_string()),
            Self::AlreadyAttended => Reason::AlreadyAttended.status(SERVICE, self.to_string()),
            Self::OtherTeam => Reason::WorkerOfAnotherTeam.status(SERVICE, self.to_string()),
            Self::Retired => Reason::WorkerRetired.status(SERVICE, self.to_string()),
            // An open stream has received the directive to register again before.
            Self::Forgotten => Reason::StaleSession.status(SERVICE, self.to_string()),
            Self::Leaving => Reason::Unavailable.status(SERVICE, self.to_string()),
            Self::Database(error) => database("attend a worker", &error),
        }
    }
}

impl IntoStatus for RegistryError {
    fn status(self) -> Status {
        match self {
            Self::NotFound(ref worker) => about_worker(Reason::WorkerNotFound, &self.to_string(), worker),
            Self::InContact(ref worker) => about_worker(Reason::WorkerInContact, &self.to_string(), worker),
            Self::Kept(refusal) => {
                let reason = Reason::ALL.iter().find(|reason| refusal.is(**reason));
                match reason {
                    // The reason of the store is the answer to the operator.
                    Some(reason) if departure::is_kept(&refusal) => {
                        reason.status_about(SERVICE, refusal.message, refusal.about)
                    }
                    _ => rpc::unavailable(
                        SERVICE,
                        "check the contents of a worker with the artifact store",
                        &refusal,
                    ),
                }
            }
            Self::Database(error) => database("change a worker", &error),
        }
    }
}

impl IntoStatus for PlaceError {
    fn status(self) -> Status {
        match self {
            Self::NoCompatibleWorker(refusals) => incompatible(&refusals),
            Self::UnknownWorker(worker) => unknown_worker(&worker),
            Self::AllWorkersBusy(refusals) => {
                let named = named(&refusals);
                let message = match named.is_empty() {
                    true => {
                        "no worker has registered, requests with the same requirements are ahead, or the leases of the group do not all fit"
                    }
                    false => "no worker can take the lease now",
                };
                Reason::AllWorkersBusy.status_about(SERVICE, message, named)
            }
            Self::Exists => Reason::LeaseExists.status(SERVICE, self.to_string()),
            Self::NoSuchLease => Reason::LeaseLost.status(SERVICE, self.to_string()),
            Self::InputUnavailable(artifact) => input_unavailable(&self.to_string(), artifact),
            Self::CacheUnavailable(cache) => cache_unavailable(&self.to_string(), cache),
            Self::NotPinned(refusal) => not_pinned(refusal, Reason::LeaseExists),
            Self::Undecided => undecided(),
            Self::Stopping => stopping(),
            Self::Database(error) => database("grant a lease", &error),
        }
    }
}

impl IntoStatus for RenewError {
    fn status(self) -> Status {
        match self {
            Self::Lost => Reason::LeaseLost.status(SERVICE, self.to_string()),
            Self::Database(error) => database("renew a lease", &error),
        }
    }
}

impl IntoStatus for UseError {
    fn status(self) -> Status {
        match self {
            Self::Lost => Reason::LeaseLost.status(SERVICE, self.to_string()),
            Self::Transfer => rpc::invalid_field("lease_token", self.to_string()),
            Self::WorkloadId => Reason::LeaseExists.status(SERVICE, self.to_string()),
            Self::Database(error) => database("use a lease", &error),
        }
    }
}

impl IntoStatus for SettleLeaseError {
    fn status(self) -> Status {
        match self {
            Self::Lost => Reason::LeaseLost.status(SERVICE, self.to_string()),
            // The reason of the store is the answer to the caller.
            Self::Store(refusal) if refusal.is(Reason::CandidateMissing) => {
                Reason::CandidateMissing.status_about(SERVICE, refusal.message, refusal.about)
            }
            // The team is the only field that the scheduler has not validated itself.
            Self::Store(refusal) if refusal.is(Reason::InvalidField) => {
                Reason::LeaseLost.status(SERVICE, "cannot settle the lease: another team uses its id")
            }
            Self::Store(refusal) => rpc::unavailable(SERVICE, "settle a lease", &refusal),
            Self::Database(error) => database("release a lease", &error),
        }
    }
}

impl IntoStatus for LeaseError {
    fn status(self) -> Status {
        match self {
            Self::NotFound(id) => {
                let about = [("lease_id", id.to_string())];
                Reason::LeaseNotFound.status_about(SERVICE, self.to_string(), about)
            }
            Self::Database(error) => database("read a lease", &error),
        }
    }
}

impl IntoStatus for TicketError {
    fn status(self) -> Status {
        match self {
            Self::NotFound(ref worker) => about_worker(Reason::WorkerNotFound, &self.to_string(), worker),
            Self::Unreachable(ref worker) => {
                about_worker(Reason::WorkerUnreachable, &self.to_string(), worker)
            }
            Self::Store(refusal) => refusal.pass_on(SERVICE),
            Self::Database(error) => database("issue a ticket", &error),
        }
    }
}

/// An error that is converted to a `Status`.
trait IntoStatus {
    /// Converts the error for callers.
    fn status(self) -> Status;
}

fn database(operation: &str, error: &DbErr) -> Status {
    rpc::unavailable(SERVICE, operation, error)
}

fn about_workload(reason: Reason, message: &str, id: domain::WorkloadId) -> Status {
    reason.status_about(SERVICE, message, [("workload_id", id.to_string())])
}

/// `worker`: the name or id in the request.
fn about_worker(reason: Reason, message: &str, worker: &(impl ToString + ?Sized)) -> Status {
    reason.status_about(SERVICE, message, [("worker", worker.to_string())])
}

fn unknown_worker(name: &str) -> Status {
    about_worker(Reason::WorkerNotFound, &format!("worker {name:?} is unknown"), name)
}

fn incompatible(refusals: &Refusals) -> Status {
    Reason::NoCompatibleWorker.status_about(SERVICE, "no worker could ever take the request", named(refusals))
}

fn named(refusals: &Refusals) -> Vec<(String, String)> {
    let mut bytes = 0;
    let clipped = |text: String| rpc::clipped(&text, MAX_NAMED_BYTES).into_owned();
    let entries = refusals.entries().into_iter().map(|(worker, reason)| (clipped(worker), clipped(reason)));
    let fit = entries.take_while(|(worker, reason)| {
        bytes += worker.len() + reason.len();
        bytes <= MAX_DETAILS_BYTES
    });
    fit.take(MAX_NAMED).collect()
}

/// `taken`: the reason to return if the id belongs to another team.
fn not_pinned(refusal: rpc::Refusal, taken: Reason) -> Status {
    // The reason of the store is the answer to the caller.
    let reason = Reason::ALL.iter().find(|reason| refusal.is(**reason));
    match reason {
        // The holder is the only field that the scheduler has not validated itself.
        Some(Reason::InvalidField) => {
            tracing::debug!(error = %refusal, "artifact store has another holder with this id");
            taken.status(SERVICE, "the id is used by another team")
        }
        Some(reason) if !refusal.is_transient() => {
            reason.status_about(SERVICE, refusal.message, refusal.about)
        }
        _ => rpc::unavailable(SERVICE, "pin the inputs", &refusal),
    }
}

fn input_unavailable(message: &str, artifact: domain::ArtifactId) -> Status {
    Reason::InputUnavailable.status_about(SERVICE, message, [("artifact_id", artifact.to_string())])
}

fn cache_unavailable(message: &str, cache: domain::CacheId) -> Status {
    Reason::InputUnavailable.status_about(SERVICE, message, [("cache_id", cache.to_string())])
}

fn undecided() -> Status {
    Reason::Unavailable
        .status(SERVICE, "cannot decide the request: the workers changed too often; call again")
}

fn invalid_token(_: rpc::token::InvalidToken) -> Status {
    Reason::InvalidToken.status(SERVICE, "the token was not signed by this scheduler")
}

fn stopping() -> Status {
    Reason::Unavailable.status(SERVICE, "the scheduler is stopping; call again")
}
