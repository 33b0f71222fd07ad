//! Changed page tokens and signed tokens, which must be rejected.
//!
//! Each case changes random bytes of a valid token; see `testing::hostile`.
use std::fmt::Debug;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use domain::worker::{
    Incarnation, LeaseClaims, ProxyClaims, Session, SessionClaims, TicketClaims, TicketOperation,
};
use domain::{AttemptId, GatewayInstance, LeaseId, Timestamp, VolumeHandle, WorkerId, WorkloadId};
use gantry_rpc::page::{List, Page};
use gantry_rpc::pb::{artifacts, scheduler};
use gantry_rpc::token::{Claims, Keys, TokenSigner};
use testing::hostile::{Counting, Draws, each, most_allocated};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Maximum memory for reading a token of this length, in bytes.
const MOST: usize = 256 << 10;

/// Changes a token in its text or in its decoded bytes.
fn changed(token: &str, draws: &mut Draws) -> String {
    let changed = match draws.below(2) {
        0 => draws.changed(token.as_bytes()),
        _ => {
            let bytes = URL_SAFE_NO_PAD.decode(token).expect("base64");
            URL_SAFE_NO_PAD.encode(draws.changed(&bytes)).into_bytes()
        }
    };
    String::from_utf8_lossy(&changed).into_owned()
}

fn check_pages<R: List>(request: impl Fn(&str) -> R, draws: &mut Draws) {
    let first = Page::of("test", &request("")).expect("the first page");
    let last = draws.uuid();
    let token = first.token(last);
    let next = Page::of("test", &request(&token)).expect("the next page");
    assert_eq!((next.after, next.token(last)), (Some(last), token.clone()));

    let other = changed(&token, draws);
    let (read, allocated) = most_allocated(|| Page::of("test", &request(&other)));
    if other.is_empty() {
        assert_eq!(read.expect("the first page").after, None);
    } else {
        assert_eq!(read.is_ok(), other == token, "{other:?}");
    }
    assert!(allocated <= MOST, "{allocated}");
}

#[test]
fn changed_page_token_is_refused() {
    each(3000, |draws| {
        let artifacts = |token: &str| artifacts::ListVolumesRequest {
            worker_id: "worker".to_owned(),
            page_token: token.to_owned(),
            ..Default::default()
        };
        let workers = |token: &str| scheduler::ListWorkersRequest {
            page_token: token.to_owned(),
            ..Default::default()
        };
        check_pages(artifacts, draws);
        check_pages(workers, draws);
    });
}

async fn check_claims<C: Claims + Clone + PartialEq + Debug>(
    claims: C,
    signer: &TokenSigner,
    keys: &Keys,
    draws: &mut Draws,
) {
    let token = signer.sign(&claims);
    assert_eq!(signer.verify::<C>(&token), Ok(claims.clone()));
    assert_eq!(keys.verify::<C>(&token).await.expect("a genuine token"), claims);

    let other = changed(&token, draws);
    let (own, allocated) = most_allocated(|| signer.verify::<C>(&other));
    assert!(allocated <= MOST, "{allocated}");
    // The signer checks its own code and not the signature.
    assert!(own.is_err() || own == Ok(claims.clone()), "{own:?}");
    let read = keys.verify::<C>(&other).await;
    assert_eq!(read.is_ok(), other == token, "{other:?}");
}

#[test]
fn changed_signed_token_is_refused() {
    let signer = TokenSigner::from_seed(&[7; 32]);
    let keys = Keys::fixed(&[signer.public()]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    each(150, |draws| {
        let worker = WorkerId::from_uuid(draws.uuid());
        let expires_at = Timestamp(draws.number().cast_signed() >> 2 & i64::MAX);
        let (incarnation, team) = (Incarnation(draws.number()), draws.text(20));
        let ticket = TicketClaims {
            worker,
            volume: VolumeHandle::from_uuid(draws.uuid()),
            team: team.clone(),
            operation: [TicketOperation::Read, TicketOperation::Write][draws.below(2)],
            expires_at,
            endpoint: draws.text(40),
        };
        let session = SessionClaims {
            worker,
            incarnation,
            session: Session(draws.number()),
            instance: GatewayInstance::from_uuid(draws.uuid()),
        };
        let attempt = (WorkloadId::from_uuid(draws.uuid()), AttemptId::from_uuid(draws.uuid()));
        let lease = LeaseClaims {
            lease: LeaseId::from_uuid(draws.uuid()),
            worker,
            incarnation,
            team,
            attempt: Some(attempt).filter(|_| draws.below(2) == 0),
        };
        runtime.block_on(async {
            check_claims(ticket, &signer, &keys, draws).await;
            check_claims(ProxyClaims { worker, expires_at }, &signer, &keys, draws).await;
            check_claims(session, &signer, &keys, draws).await;
            check_claims(lease, &signer, &keys, draws).await;
        });
    });
}
