//! Signed tokens: session credentials, lease tokens and tickets. The scheduler signs them, and all
//! other services verify them offline.
//!
//! A token is the base64url of `payload ‖ key id (8 bytes) ‖ Ed25519 signature (64 bytes)`. The
//! signature covers the kind of the token and the payload, so that a token of one kind is never
//! valid as another kind.
//!
//! The payload ends with a code over the kind and the claims: a keyed BLAKE3 hash whose key is
//! derived from the secret of the signer. The scheduler verifies its own tokens with the code,
//! which takes a hundredth of the time of a signature. Callers treat tokens as opaque.

use std::collections::HashMap;
use std::sync::RwLock;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use domain::worker::{
    Incarnation, LeaseClaims, ProxyClaims, Session, SessionClaims, TicketClaims, TicketOperation,
};
use domain::{AttemptId, GatewayInstance, LeaseId, Timestamp, VolumeHandle, WorkerId, WorkloadId};
use ed25519_dalek::{Signature, Signer, SigningKey, Verifier, VerifyingKey};
use prost::Message;
use subtle::ConstantTimeEq;
use tokio::sync::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use crate::pb::scheduler as pb;
use crate::{Peer, Reason, Refusal};

/// Id of a key: the first bytes of its public half.
pub type KeyId = [u8; 8];

/// Claims that can be signed.
pub trait Claims: Sized {
    /// Kind of the token. It is part of the signed bytes.
    const KIND: &'static str;
    /// Encodes the claims as a payload.
    fn encode(&self) -> Vec<u8>;
    /// Decodes the claims of a payload. `None`: the payload is malformed.
    fn decode(payload: &[u8]) -> Option<Self>;
}

/// A token that this scheduler did not sign for the expected kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the token is malformed, forged or of another kind")]
pub struct InvalidToken;

/// A token could not be verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The scheduler did not sign the token for the expected kind.
    #[error(transparent)]
    Invalid(#[from] InvalidToken),
    /// The key is unknown, and the scheduler did not return its keys.
    #[error("cannot get the keys of the scheduler")]
    KeysUnavailable(#[from] Refusal),
}

/// Context in which the key of the codes is derived from the secret.
const CODE_CONTEXT: &str = "gantry 2026-11-23 codes of tokens for their signer";

/// Signer of tokens. Only the scheduler has one.
#[derive(Clone)]
pub struct TokenSigner {
    key: SigningKey,
    code_key: [u8; 32],
}

impl TokenSigner {
    /// Creates the signer with this secret.
    #[must_use]
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        Self { key: SigningKey::from_bytes(seed), code_key: blake3::derive_key(CODE_CONTEXT, seed) }
    }

    /// Returns the public key and its id.
    #[must_use]
    pub fn public(&self) -> pb::PublicKey {
        let key = self.key.verifying_key();
        pb::PublicKey { key_id: key_id(&key).to_vec().into(), ed25519: key.as_bytes().to_vec().into() }
    }

    /// Signs `claims`.
    #[must_use]
    pub fn sign<C: Claims>(&self, claims: &C) -> String {
        let mut token = claims.encode();
        let code = Code { code: self.code::<C>(&token).to_vec() };
        token.extend(code.encode_to_vec());
        let signature = self.key.sign(&signed_bytes(C::KIND, &token));
        token.extend_from_slice(&key_id(&self.key.verifying_key()));
        token.extend_from_slice(&signature.to_bytes());
        URL_SAFE_NO_PAD.encode(token)
    }

    /// Verifies a token of this signer by its code and ignores the signature. A token of an older
    /// version has no code and is verified by its signature.
    pub fn verify<C: Claims>(&self, token: &str) -> Result<C, InvalidToken> {
        let Unverified { payload, signature, .. } = Unverified::parse(token)?;
        let claims = C::decode(&payload).ok_or(InvalidToken)?;
        let code = Code::decode(payload.as_slice()).map_err(|_| InvalidToken)?.code;
        let is_genuine = if code.is_empty() {
            // Signatures are deterministic (RFC 8032). Signing again takes a third of the time of a
            // verification.
            let own = self.key.sign(&signed_bytes(C::KIND, &payload));
            own.to_bytes().ct_eq(&signature.to_bytes())
        } else {
            self.code::<C>(&claims.encode()).ct_eq(code.as_slice())
        };
        if bool::from(is_genuine) { Ok(claims) } else { Err(InvalidToken) }
    }

    /// Returns the code of encoded claims, which only this signer can compute.
    fn code<C: Claims>(&self, claims: &[u8]) -> [u8; 32] {
        blake3::keyed_hash(&self.code_key, &signed_bytes(C::KIND, claims)).into()
    }
}

/// Minimum time between two calls for keys after the scheduler answered.
///
/// Any client can send tokens with unknown key ids. The limit keeps such tokens from causing a call
/// each.
pub const KEYS_KEPT: Duration = Duration::from_secs(5);
/// Deadline of a call for keys.
const KEYS_DEADLINE: Duration = Duration::from_secs(5);
/// Maximum size of a token in bytes. Genuine tokens have a few hundred bytes.
const MAX_TOKEN_BYTES: usize = 16 << 10;
/// Minimum time between two calls for keys after the scheduler did not answer.
pub const KEYS_RETRY: Duration = Duration::from_secs(1);

/// Public keys of the scheduler. Missing keys are requested from it.
///
/// Invariant: a token with a known key causes no call. All tokens of the process together cause at
/// most one call in [`KEYS_KEPT`], or in [`KEYS_RETRY`] while the scheduler does not answer. The
/// lock on `refreshed` enforces it.
pub struct Keys {
    /// `None`: the set of keys is fixed.
    scheduler: Option<Peer>,
    known: RwLock<HashMap<KeyId, VerifyingKey>>,
    /// Last call for keys. `None`: there was none.
    refreshed: Mutex<Option<Refreshed>>,
}

/// Time and result of a call for keys.
struct Refreshed {
    at: Instant,
    outcome: Result<(), Refusal>,
}

impl Refreshed {
    /// Whether it is too early for the next call.
    fn is_recent(&self) -> bool {
        let kept = if self.outcome.is_ok() { KEYS_KEPT } else { KEYS_RETRY };
        self.at.elapsed() < kept
    }
}

impl Keys {
    /// Starts without keys and requests them from `scheduler`.
    #[must_use]
    pub fn new(scheduler: Peer) -> Self {
        Self { scheduler: Some(scheduler), known: RwLock::default(), refreshed: Mutex::default() }
    }

    /// Uses a fixed set of keys.
    #[must_use]
    pub fn fixed(keys: &[pb::PublicKey]) -> Self {
        let known = RwLock::new(keys.iter().filter_map(verifying_key).collect());
        Self { scheduler: None, known, refreshed: Mutex::default() }
    }

    /// Verifies a token and returns its claims.
    pub async fn verify<C: Claims>(&self, token: &str) -> Result<C, VerifyError> {
        let unverified = Unverified::parse(token)?;
        if let Some(key) = self.get(unverified.key_id) {
            return Ok(unverified.verify(&key)?);
        }
        self.refresh(unverified.key_id).await?;
        let key = self.get(unverified.key_id).ok_or(InvalidToken)?;
        Ok(unverified.verify(&key)?)
    }

    fn get(&self, id: KeyId) -> Option<VerifyingKey> {
        self.known.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(&id).copied()
    }

    /// Requests the keys of the scheduler, unless the last request was too recent.
    async fn refresh(&self, missing: KeyId) -> Result<(), Refusal> {
        let Some(scheduler) = &self.scheduler else { return Ok(()) };
        let mut refreshed = self.refreshed.lock().await;
        // Another call may have added the key while this call waited for the lock.
        if self.get(missing).is_some() {
            return Ok(());
        }
        if let Some(last) = refreshed.as_ref().filter(|last| last.is_recent()) {
            return last.outcome.clone();
        }
        // The caller may be cancelled before the response. The time of the call is therefore
        // recorded at its start.
        let unanswered = Reason::Unavailable.status("gantry", "the scheduler has not answered yet");
        *refreshed = Some(Refreshed { at: Instant::now(), outcome: Err(unanswered.into()) });
        let outcome = self.request_keys(scheduler.clone()).await;
        *refreshed = Some(Refreshed { at: Instant::now(), outcome: outcome.clone() });
        outcome
    }

    async fn request_keys(&self, scheduler: Peer) -> Result<(), Refusal> {
        let mut request = tonic::Request::new(pb::KeysRequest {});
        // Other calls wait for this response.
        request.set_timeout(KEYS_DEADLINE);
        let response = pb::workers_client::WorkersClient::new(scheduler).keys(request).await?.into_inner();
        let keys = response.keys.iter().filter_map(verifying_key);
        self.known.write().unwrap_or_else(std::sync::PoisonError::into_inner).extend(keys);
        Ok(())
    }
}

struct Unverified {
    payload: Vec<u8>,
    key_id: KeyId,
    signature: Signature,
}

impl Unverified {
    fn parse(token: &str) -> Result<Self, InvalidToken> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(InvalidToken);
        }
        let mut payload = URL_SAFE_NO_PAD.decode(token).map_err(|_| InvalidToken)?;
        let split = payload.len().checked_sub(8 + 64).ok_or(InvalidToken)?;
        let tail = payload.split_off(split);
        let key_id = tail[..8].try_into().map_err(|_| InvalidToken)?;
        let signature = Signature::from_slice(&tail[8..]).map_err(|_| InvalidToken)?;
        Ok(Self { payload, key_id, signature })
    }

    fn verify<C: Claims>(&self, key: &VerifyingKey) -> Result<C, InvalidToken> {
        key.verify(&signed_bytes(C::KIND, &self.payload), &self.signature).map_err(|_| InvalidToken)?;
        C::decode(&self.payload).ok_or(InvalidToken)
    }
}

fn signed_bytes(kind: &str, payload: &[u8]) -> Vec<u8> {
    [b"gantry/1/", kind.as_bytes(), b"\0", payload].concat()
}

/// Parses a public key. `None`: the key is malformed.
fn verifying_key(key: &pb::PublicKey) -> Option<(KeyId, VerifyingKey)> {
    let key = VerifyingKey::from_bytes(key.ed25519.as_ref().try_into().ok()?).ok()?;
    Some((key_id(&key), key))
}

fn key_id(key: &VerifyingKey) -> KeyId {
    let mut id = [0; 8];
    id.copy_from_slice(&key.as_bytes()[..8]);
    id
}

#[derive(Clone, PartialEq, Message)]
struct Payload {
    #[prost(bytes = "vec", repeated, tag = "1")]
    ids: Vec<Vec<u8>>,
    #[prost(uint64, repeated, tag = "2")]
    numbers: Vec<u64>,
    #[prost(string, tag = "3")]
    team: String,
    /// Address of the gateway. Only set in a ticket.
    #[prost(string, tag = "5")]
    endpoint: String,
}

impl Payload {
    fn id(&self, index: usize) -> Option<Uuid> {
        Uuid::from_slice(self.ids.get(index)?).ok()
    }
}

/// Code at the end of a payload. Decoders of [`Payload`] ignore this unknown field.
#[derive(Clone, PartialEq, Message)]
struct Code {
    #[prost(bytes = "vec", tag = "4")]
    code: Vec<u8>,
}

fn bytes(uuid: Uuid) -> Vec<u8> {
    uuid.as_bytes().to_vec()
}

impl Claims for SessionClaims {
    const KIND: &'static str = "session";

    fn encode(&self) -> Vec<u8> {
        let ids = vec![bytes(self.worker.uuid()), bytes(self.instance.uuid())];
        Payload { ids, numbers: vec![self.incarnation.0, self.session.0], ..Payload::default() }
            .encode_to_vec()
    }

    fn decode(payload: &[u8]) -> Option<Self> {
        let payload = Payload::decode(payload).ok()?;
        Some(Self {
            worker: WorkerId::from_uuid(payload.id(0)?),
            instance: GatewayInstance::from_uuid(payload.id(1)?),
            incarnation: Incarnation(*payload.numbers.first()?),
            session: Session(*payload.numbers.get(1)?),
        })
    }
}

impl Claims for LeaseClaims {
    const KIND: &'static str = "lease";

    fn encode(&self) -> Vec<u8> {
        let mut ids = vec![bytes(self.lease.uuid()), bytes(self.worker.uuid())];
        if let Some((workload, attempt)) = self.attempt {
            ids.extend([bytes(workload.uuid()), bytes(attempt.uuid())]);
        }
        let (numbers, team) = (vec![self.incarnation.0], self.team.clone());
        Payload { ids, numbers, team, ..Payload::default() }.encode_to_vec()
    }

    fn decode(payload: &[u8]) -> Option<Self> {
        let payload = Payload::decode(payload).ok()?;
        let attempt = match payload.ids.len() {
            2 => None,
            _ => Some((WorkloadId::from_uuid(payload.id(2)?), AttemptId::from_uuid(payload.id(3)?))),
        };
        Some(Self {
            lease: LeaseId::from_uuid(payload.id(0)?),
            worker: WorkerId::from_uuid(payload.id(1)?),
            incarnation: Incarnation(*payload.numbers.first()?),
            team: payload.team,
            attempt,
        })
    }
}

impl Claims for TicketClaims {
    const KIND: &'static str = "ticket";

    fn encode(&self) -> Vec<u8> {
        let operation = match self.operation {
            TicketOperation::Write => 1,
            TicketOperation::Read => 2,
        };
        let expires = u64::try_from(self.expires_at.0).unwrap_or(0);
        let ids = vec![bytes(self.worker.uuid()), bytes(self.volume.uuid())];
        let (numbers, team) = (vec![operation, expires], self.team.clone());
        Payload { ids, numbers, team, endpoint: self.endpoint.clone() }.encode_to_vec()
    }

    fn decode(payload: &[u8]) -> Option<Self> {
        let payload = Payload::decode(payload).ok()?;
        Some(Self {
            worker: WorkerId::from_uuid(payload.id(0)?),
            volume: VolumeHandle::from_uuid(payload.id(1)?),
            operation: match payload.numbers.first()? {
                1 => TicketOperation::Write,
                2 => TicketOperation::Read,
                _ => return None,
            },
            expires_at: Timestamp(i64::try_from(*payload.numbers.get(1)?).ok()?),
            team: payload.team,
            endpoint: payload.endpoint,
        })
    }
}

impl Claims for ProxyClaims {
    const KIND: &'static str = "proxy";

    fn encode(&self) -> Vec<u8> {
        let expires = u64::try_from(self.expires_at.0).unwrap_or(0);
        let ids = vec![bytes(self.worker.uuid())];
        Payload { ids, numbers: vec![expires], ..Payload::default() }.encode_to_vec()
    }

    fn decode(payload: &[u8]) -> Option<Self> {
        let payload = Payload::decode(payload).ok()?;
        Some(Self {
            worker: WorkerId::from_uuid(payload.id(0)?),
            expires_at: Timestamp(i64::try_from(*payload.numbers.first()?).ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> LeaseClaims {
        LeaseClaims {
            lease: LeaseId::new(),
            worker: WorkerId::new(),
            incarnation: Incarnation(7),
            team: "main".to_owned(),
            attempt: Some((WorkloadId::new(), AttemptId::new())),
        }
    }

    #[test]
    fn signed_token_has_its_claims() {
        let signer = TokenSigner::from_seed(&[1; 32]);
        let claims = lease();
        assert_eq!(signer.verify(&signer.sign(&claims)), Ok(claims));
        let driven = LeaseClaims { attempt: None, ..lease() };
        assert_eq!(signer.verify(&signer.sign(&driven)), Ok(driven));
        let proxy = ProxyClaims { worker: WorkerId::new(), expires_at: Timestamp::now() };
        assert_eq!(signer.verify(&signer.sign(&proxy)), Ok(proxy));
        let ticket = TicketClaims {
            worker: WorkerId::new(),
            volume: VolumeHandle::new(),
            team: "main".to_owned(),
            operation: TicketOperation::Read,
            expires_at: Timestamp::now(),
            endpoint: "http://worker:7080".to_owned(),
        };
        assert_eq!(signer.verify(&signer.sign(&ticket)), Ok(ticket));
    }

    #[test]
    fn token_without_code_is_verified_by_signature() {
        let (signer, claims) = (TokenSigner::from_seed(&[1; 32]), lease());
        let sign_without_code = |key: &SigningKey| {
            let mut token = claims.encode();
            let signature = key.sign(&signed_bytes(LeaseClaims::KIND, &token));
            token.extend_from_slice(&key_id(&key.verifying_key()));
            token.extend_from_slice(&signature.to_bytes());
            URL_SAFE_NO_PAD.encode(token)
        };
        assert_eq!(signer.verify(&sign_without_code(&signer.key)), Ok(claims.clone()));
        let other = SigningKey::from_bytes(&[2; 32]);
        assert_eq!(signer.verify::<LeaseClaims>(&sign_without_code(&other)), Err(InvalidToken));
    }

    #[tokio::test]
    async fn forged_token_is_rejected() {
        let signer = TokenSigner::from_seed(&[1; 32]);
        let others = Keys::fixed(&[signer.public()]);
        let token = signer.sign(&lease());
        assert!(others.verify::<LeaseClaims>(&token).await.is_ok());
        assert!(others.verify::<TicketClaims>(&token).await.is_err());
        assert_eq!(signer.verify::<TicketClaims>(&token), Err(InvalidToken));
        assert_eq!(TokenSigner::from_seed(&[2; 32]).verify::<LeaseClaims>(&token), Err(InvalidToken));
        let bytes = URL_SAFE_NO_PAD.decode(&token).expect("base64");
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let changed = URL_SAFE_NO_PAD.encode(changed);
            assert!(others.verify::<LeaseClaims>(&changed).await.is_err(), "bit {bit}");
            // The signer ignores the key id and the signature after the code.
            let is_of_payload = bit < (bytes.len() - 72) * 8;
            assert_eq!(signer.verify::<LeaseClaims>(&changed).is_err(), is_of_payload, "bit {bit}");
        }
    }
}
