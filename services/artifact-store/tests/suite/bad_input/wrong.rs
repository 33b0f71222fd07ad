//! Kinds of invalid values that only the store has.

use domain::GatewayInstance;
use domain::worker::{Incarnation, Session, SessionClaims};
use rpc::Reason::*;
use rpc::token::TokenSigner;
use testing::bad_input::wrong::{but, named, refused};
use testing::bad_input::{Bad, Expected};

use crate::{Gateway, Suite};

pub(super) fn refused_message() -> Expected {
    refused("message")
}

/// Returns invalid reasons for people.
pub(super) fn reason(field: &str) -> Vec<Bad> {
    named(field, 1000)
}

/// Returns invalid credentials of a gateway.
pub(super) fn credential(field: &str, suite: &Suite, gateway: &Gateway) -> Vec<Bad> {
    let mut bad = optional_credential(field, suite, gateway);
    bad.extend(but(field, "missing", "", InvalidToken));
    bad
}

/// Returns invalid credentials where an operator needs none: unsigned ones, and those of
/// predecessors of `gateway`, whose incarnation and session are both 2.
pub(super) fn optional_credential(field: &str, suite: &Suite, gateway: &Gateway) -> Vec<Bad> {
    let claims = SessionClaims {
        worker: gateway.worker,
        incarnation: Incarnation(2),
        session: Session(2),
        instance: GatewayInstance::new(),
    };
    let forged = TokenSigner::from_seed(&[8; 32]).sign(&claims);
    let of = |incarnation, session| suite.silent_gateway(gateway.worker, incarnation, session).credential;
    [
        but(field, "malformed", "x", InvalidToken),
        but(field, "overlong", "x".repeat(100_000), InvalidToken),
        but(field, "forged", forged, InvalidToken),
        but(field, "of a session before", of(2, 1), StaleSession),
        but(field, "of an incarnation before", of(1, 3), StaleIncarnation),
    ]
    .into_iter()
    .flatten()
    .collect()
}
