//! The three services on the wire: parse, call [`crate::app::App`], answer. The only code that makes a `Status`.

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

use crate::app::TicketError;
use crate::insight::explain::ExplainError;
use crate::leases::{LeaseError, RenewError};
use crate::lifecycle::departure::{self, RegistryError};
use crate::placement::Refusals;
use crate::scheduling::{PlaceError, SubmitError};
use crate::workers::SessionError;
use crate::workloads::{AttemptError, OtherSpec, WorkloadError};

pub(crate) use placements::PlacementsService;
pub(crate) use workers::WorkersService;
pub(crate) use workloads::WorkloadsService;

/// Who answers, in error details.
const SERVICE: &str = "gantry.scheduler";

/// How many workers an error names: its details travel in headers, which are bounded.
const NAMED: usize = 20;

/// How many bytes it says of each, and under how long a name.
const NAMED_BYTES: usize = 500;

/// How many bytes in all: of 16 KiB, which is what headers have room for, encoded and with the rest of the error.
const ALL_NAMED_BYTES: usize = 8 << 10;

/// Whose things are listed. `None`: those of all teams.
fn team_or_all(team: &str) -> Result<Option<String>, Status> {
    if team.is_empty() { Ok(None) } else { parse_team("team", team.to_owned()).map(Some) }
}

/// What is on this page of what was found, which is one more where there are more. Answers where to go on as well. Empty: that was all.
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

impl Reasoned for SubmitError {
    fn status(self) -> Status {
        match self {
            Self::Exists(OtherSpec(id)) => about_workload(Reason::WorkloadExists, &self.to_string(), id),
            Self::NoCompatibleWorker(refusals) => incompatible(&refusals),
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

impl Reasoned for WorkloadError {
    fn status(self) -> Status {
        match self {
            Self::NotFound(id) => about_workload(Reason::WorkloadNotFound, &self.to_string(), id),
            Self::Database(error) => database("look at a workload", &error),
        }
    }
}

impl Reasoned for ExplainError {
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
            Self::NotLocated(refusal) => rpc::unavailable(SERVICE, "locate the inputs", &refusal),
            Self::Database(error) => database("explain a placement", &error),
        }
    }
}

impl Reasoned for AttemptError {
    fn status(self) -> Status {
        match self {
            Self::LeaseLost => Reason::LeaseLost.status(SERVICE, self.to_string()),
            Self::Database(error) => database("note what an attempt does", &error),
        }
    }
}

impl Reasoned for SessionError {
    fn status(self) -> Status {
        match self {
            Self::Stale => Reason::StaleSession.status(SERVICE, self.to_string()),
            Self::AlreadyAttended => Reason::AlreadyAttended.status(SERVICE, self.to_string()),
            Self::OtherTeam => Reason::WorkerOfAnotherTeam.status(SERVICE, self.to_string()),
            Self::Retired => Reason::WorkerRetired.status(SERVICE, self.to_string()),
            // Where there is a stream, it has said before to begin anew.
            Self::Forgotten => Reason::StaleSession.status(SERVICE, self.to_string()),
            Self::Leaving => Reason::Unavailable.status(SERVICE, self.to_string()),
            Self::Database(error) => database("attend a worker", &error),
        }
    }
}

impl Reasoned for RegistryError {
    fn status(self) -> Status {
        match self {
            Self::NotFound(ref worker) => about_worker(Reason::WorkerNotFound, &self.to_string(), worker),
            Self::InContact(ref worker) => about_worker(Reason::WorkerInContact, &self.to_string(), worker),
            Self::Kept(refusal) => {
                let reason = Reason::ALL.iter().find(|reason| refusal.is(**reason));
                match reason {
                    // The store's reason is the answer to the operator's question.
                    Some(reason) if departure::is_kept(&refusal) => {
                        reason.status_about(SERVICE, refusal.message, refusal.about)
                    }
                    _ => rpc::unavailable(SERVICE, "ask what a worker holds", &refusal),
                }
            }
            Self::Database(error) => database("change a worker", &error),
        }
    }
}

impl Reasoned for PlaceError {
    fn status(self) -> Status {
        match self {
            Self::NoCompatibleWorker(refusals) => incompatible(&refusals),
            Self::AllWorkersBusy(refusals) => {
                let named = named(&refusals);
                let what = match named.is_empty() {
                    true => {
                        "no worker has registered, others that wait are before it, or there is not room for all that is asked for together"
                    }
                    false => "no worker can do now",
                };
                Reason::AllWorkersBusy.status_about(SERVICE, what, named)
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

impl Reasoned for RenewError {
    fn status(self) -> Status {
        match self {
            Self::Lost => Reason::LeaseLost.status(SERVICE, self.to_string()),
            Self::Database(error) => database("renew a lease", &error),
        }
    }
}

impl Reasoned for LeaseError {
    fn status(self) -> Status {
        match self {
            Self::NotFound(id) => {
                let about = [("lease_id", id.to_string())];
                Reason::LeaseNotFound.status_about(SERVICE, self.to_string(), about)
            }
            Self::Database(error) => database("look at a lease", &error),
        }
    }
}

impl Reasoned for TicketError {
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

/// An error that callers can act on.
trait Reasoned {
    /// As they see it.
    fn status(self) -> Status;
}

fn database(doing: &str, error: &DbErr) -> Status {
    rpc::unavailable(SERVICE, doing, error)
}

fn about_workload(reason: Reason, message: &str, id: domain::WorkloadId) -> Status {
    reason.status_about(SERVICE, message, [("workload_id", id.to_string())])
}

/// `worker`: its name or its id, as it was asked for.
fn about_worker(reason: Reason, message: &str, worker: &(impl ToString + ?Sized)) -> Status {
    reason.status_about(SERVICE, message, [("worker", worker.to_string())])
}

fn unknown_worker(name: &str) -> Status {
    about_worker(Reason::WorkerNotFound, &format!("worker {name:?} is unknown"), name)
}

fn incompatible(refusals: &Refusals) -> Status {
    Reason::NoCompatibleWorker.status_about(SERVICE, "no worker could ever run it", named(refusals))
}

fn named(refusals: &Refusals) -> Vec<(String, String)> {
    let mut bytes = 0;
    let clipped = |text: String| rpc::clipped(&text, NAMED_BYTES).into_owned();
    let entries = refusals.entries().into_iter().map(|(who, what)| (clipped(who), clipped(what)));
    let fit = entries.take_while(|(who, what)| {
        bytes += who.len() + what.len();
        bytes <= ALL_NAMED_BYTES
    });
    fit.take(NAMED).collect()
}

/// `taken`: what it means that the id belongs to another team.
fn not_pinned(refusal: rpc::Refusal, taken: Reason) -> Status {
    // The store's reason is the answer to the caller's question.
    let reason = Reason::ALL.iter().find(|reason| refusal.is(**reason));
    match reason {
        // By whom it shall be held is all that we have not checked ourselves.
        Some(Reason::InvalidField) => {
            tracing::debug!(error = %refusal, "the artifact store holds something else by this id");
            taken.status(SERVICE, "the id was used by another team")
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
    Reason::Unavailable.status(SERVICE, "the workers changed too often while it was decided, call again")
}

fn invalid_token(_: rpc::token::InvalidToken) -> Status {
    Reason::InvalidToken.status(SERVICE, "the token was not signed by this scheduler")
}

fn stopping() -> Status {
    Reason::Unavailable.status(SERVICE, "the scheduler is stopping, call again")
}
