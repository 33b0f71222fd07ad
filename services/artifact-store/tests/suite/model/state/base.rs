//! Base resource types and certificates of workers: the last artifact that was put, until the
//! worker is forgotten.

use rpc::Reason;

use super::{Accepted, Outcome, State, Violation, must, worker_id};
use crate::model::operations::Artifact;

impl State {
    /// Returns the artifacts of workers, and for certificates the store's description of the owner.
    pub(crate) fn held_by_workers(&self) -> impl Iterator<Item = (Artifact, Option<String>)> {
        let words = |(worker, resource): &(u8, Option<u8>)| {
            resource.is_none().then(|| format!("resource certs of worker {}", worker_id(*worker)))
        };
        self.base.iter().map(move |(of, artifact)| (*artifact, words(of)))
    }

    /// Returns the workers with a base resource type or certificates.
    pub(crate) fn with_base(&self) -> Vec<u8> {
        self.base.keys().map(|(worker, _)| *worker).collect()
    }

    pub(super) fn put_base(
        &mut self,
        of: (u8, Option<u8>),
        artifact: Artifact,
        outcome: &Outcome,
    ) -> Accepted {
        if let Outcome::Refused(refusal) = outcome {
            let may = refusal.is(Reason::ArtifactNotFound) && !self.is_kept_and_sealed(artifact);
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        self.hand_over(artifact)?;
        self.base.insert(of, artifact);
        Ok(())
    }
}
