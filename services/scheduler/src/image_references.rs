//! References of images in specs: their tags are replaced by digests.

use std::collections::HashMap;

use domain::workload::{Image, WorkloadSpec};
use rpc::pb::streamer::ResolveRequest;
use rpc::pb::streamer::images_client::ImagesClient;
use rpc::{Peer, Reason, Refusal};
use tonic::Request;

use crate::store_client::DEADLINE;

/// The streamer, which looks references up in registries. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ImageReferences(Option<ImagesClient<Peer>>);

impl ImageReferences {
    /// Creates a client for the streamer behind `peer`. `None`: there is no streamer.
    pub(crate) fn new(peer: Option<Peer>) -> Self {
        Self(peer.map(ImagesClient::new))
    }

    /// Returns the spec with a digest in each reference.
    pub(crate) async fn resolve(&self, mut spec: WorkloadSpec) -> Result<WorkloadSpec, Refusal> {
        let team = spec.team.clone();
        let images = spec.services.iter_mut().map(|service| &mut service.image).chain([&mut spec.image]);
        for image in images {
            if let Image::Reference(reference) = image
                && !reference.contains('@')
            {
                *reference = self.digest(&team, reference).await?;
            }
        }
        Ok(spec)
    }

    async fn digest(&self, team: &str, reference: &str) -> Result<String, Refusal> {
        let Some(client) = &self.0 else {
            let message = "the scheduler has no streamer that looks up image references (--streamer); pull the image, and name its artifact";
            return Err(Refusal {
                code: Reason::Unsupported.code(),
                reason: Some(Reason::Unsupported.as_str().to_owned()),
                message: message.to_owned(),
                about: HashMap::new(),
            });
        };
        let (team, reference) = (team.to_owned(), reference.to_owned());
        let mut request = Request::new(ResolveRequest { team, reference, ..ResolveRequest::default() });
        request.set_timeout(DEADLINE);
        Ok(client.clone().resolve(request).await?.into_inner().reference)
    }
}

/// Whether a spec has a reference without a digest.
pub(crate) fn has_tags(spec: &WorkloadSpec) -> bool {
    let mut images = spec.services.iter().map(|service| &service.image).chain([&spec.image]);
    images.any(|image| matches!(image, Image::Reference(reference) if !reference.contains('@')))
}
