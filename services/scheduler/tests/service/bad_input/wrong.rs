//! Invalid values of fields that only the scheduler has.

use domain::worker::LeaseClaims;
use domain::{LeaseId, WorkerId};
use prost_reflect::Value;
use rpc::Reason::*;
use rpc::token::{Claims, Keys, TokenSigner};
use testing::bad_input::Bad;
use testing::bad_input::wrong::{but, id, invalid, longest, malformed, text};

use super::world::World;

/// Name or id of a worker. The field is required.
pub(super) fn worker(field: &str, world: &World<'_>) -> Vec<Bad> {
    let mut bad = worker_or_any(field, world);
    bad.extend(invalid(field, "missing", text(""), field));
    bad
}

/// Name or id of a worker. An empty field stands for any worker.
pub(super) fn worker_or_any(field: &str, world: &World<'_>) -> Vec<Bad> {
    let mut bad = longest(field, 255);
    bad.extend(but(field, "unknown", "unknown", WorkerNotFound));
    bad.extend(but(field, "of an unknown id", WorkerId::new(), WorkerNotFound));
    bad.extend(but(field, "that was pruned", &world.pruned, WorkerNotFound));
    bad
}

/// Id of a worker.
pub(super) fn worker_id(field: &str, world: &World<'_>) -> Vec<Bad> {
    let mut bad = id(field);
    bad.extend(but(field, "unknown", WorkerId::new(), WorkerNotFound));
    bad.extend(but(field, "that was pruned", &world.pruned, WorkerNotFound));
    bad
}

/// Lease token with a wrong signature or of another kind.
pub(super) async fn token(field: &str, world: &World<'_>, good: &str) -> Vec<Bad> {
    let claims: LeaseClaims = Keys::new(world.scheduler.peer()).verify(good).await.expect("ours");
    let forged = signed_by_another(&claims);
    let unknown = signed_by_another(&LeaseClaims { lease: LeaseId::new(), ..claims });
    [
        but(field, "missing", "", InvalidToken),
        but(field, "malformed", "x", InvalidToken),
        but(field, "overlong", "x".repeat(100_000), InvalidToken),
        but(field, "cut off", &good[..good.len() - 4], InvalidToken),
        but(field, "forged", forged, InvalidToken),
        but(field, "forged, of an unknown lease", unknown, InvalidToken),
        but(field, "that is a session's", &world.one.welcome.session_credential, InvalidToken),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn signed_by_another(claims: &impl Claims) -> String {
    TokenSigner::from_seed(&[8; 32]).sign(claims)
}

/// Id in a list of ids. The list may be empty.
pub(super) fn id_in_list(field: &str) -> Vec<Bad> {
    let mut bad = malformed(field);
    bad.extend(invalid(field, "empty", Value::List(vec![text("")]), field));
    bad
}
