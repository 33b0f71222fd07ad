//! Access to the bytes of one volume on a Garden worker.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use concourse::baggageclaim::{Encoded, Encoding, Error, P2pUrl, Strategy, StreamIn, VolumeRequest};
use domain::VolumeHandle;
use runtime::{Archive, Inlet, RemoteVolume, RuntimeError};

use super::{Worker, errors, properties, tar_util, volumes};

/// Limit of a stored manifest, in bytes: the limit of [`transfer::Limits`] and a header.
const MAX_MANIFEST: usize = (1 << 30) + 4096;

pub(super) struct Volume {
    worker: Arc<Worker>,
    handle: VolumeHandle,
}

impl Volume {
    pub(super) fn new(worker: Arc<Worker>, handle: VolumeHandle) -> Self {
        Self { worker, handle }
    }

    fn failed(&self, doing: &str, path: &Path, error: Error) -> RuntimeError {
        match error {
            Error::NoSuchPath => RuntimeError::PathNotFound(path.display().to_string()),
            error => errors::volume(doing, self.handle, error),
        }
    }
}

#[async_trait]
impl RemoteVolume for Volume {
    async fn read(&self, path: &Path) -> Result<Archive, RuntimeError> {
        let (name, from) = (volumes::name(self.handle.to_string())?, volumes::text(path)?);
        let archive = self.worker.volumes.stream_out(&name, from, self.worker.encoding).await;
        Ok(Box::pin(archive.map_err(|error| self.failed("stream a volume out", path, error))?))
    }

    async fn write(&self, path: &Path, archive: Archive) -> Result<(), RuntimeError> {
        let name = volumes::name(self.handle.to_string())?;
        let mut how = StreamIn::new(self.worker.encoding);
        volumes::text(path)?.clone_into(&mut how.path);
        let archive = Encoded::new(self.worker.encoding, archive)
            .map_err(|error| RuntimeError::io("encode an archive", error))?;
        let streamed = self.worker.volumes.stream_in(&name, &how, archive).await;
        streamed.map_err(|error| self.failed("stream into a volume", path, error))
    }

    /// Stores the manifest beside the volume, because the contents of the volume belong to its
    /// owner. The property that makes the manifest valid is set last.
    async fn store_manifest(&self, manifest: Vec<u8>) -> Result<(), RuntimeError> {
        self.worker.volume(self.handle).await?;
        let failed = |error| errors::volume("store a manifest", self.handle, error);
        let name = volumes::sidecar(self.handle)?;
        let mut request = VolumeRequest::new(name.clone(), Strategy::Empty);
        request.properties.insert(properties::KIND.to_owned(), properties::SIDECAR.to_owned());
        let client = &self.worker.volumes;
        match client.create(&request).await {
            Ok(_) => {}
            Err(Error::AlreadyExists) => {
                // There is no valid manifest until the new one is complete.
                client
                    .set_property(&name, properties::MANIFEST_BYTES, properties::NO_PROCESS)
                    .await
                    .map_err(failed)?;
            }
            Err(error) => return Err(failed(error)),
        }
        let archive = tar_util::stream(tar_util::archive_of_file(volumes::MANIFEST, &manifest));
        let encoded = Encoded::new(self.worker.encoding, archive)
            .map_err(|error| RuntimeError::io("encode an archive", error))?;
        client.stream_in(&name, &StreamIn::new(self.worker.encoding), encoded).await.map_err(failed)?;
        let length = manifest.len().to_string();
        client.set_property(&name, properties::MANIFEST_BYTES, &length).await.map_err(failed)
    }

    async fn read_manifest(&self) -> Result<Option<Vec<u8>>, RuntimeError> {
        let failed = |error| errors::volume("read a manifest", self.handle, error);
        let (client, name) = (&self.worker.volumes, volumes::sidecar(self.handle)?);
        let kept = match client.get(&name).await {
            Ok(kept) => kept,
            Err(Error::NotFound) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let length = kept.properties.get(properties::MANIFEST_BYTES).and_then(|length| length.parse().ok());
        let Some(length) = length.filter(|length: &usize| *length <= MAX_MANIFEST) else { return Ok(None) };
        let archive = client.stream_out(&name, volumes::MANIFEST, self.worker.encoding).await;
        let archive = Box::pin(archive.map_err(failed)?);
        let found = tar_util::file(archive, length).await;
        let found = found.map_err(|error| RuntimeError::io("read a manifest", error))?;
        Ok(found.filter(|manifest| manifest.len() == length))
    }

    async fn inlet(&self) -> Result<Option<Inlet>, RuntimeError> {
        if !self.worker.config.peer_to_peer {
            return Ok(None);
        }
        let address = self.worker.volumes.p2p_url().await;
        let address = address.map_err(|error| errors::volume("report its address", self.handle, error))?;
        Ok(Some(Inlet {
            address: address.as_str().to_owned(),
            volume: self.handle,
            encoding: self.worker.encoding.as_str().to_owned(),
        }))
    }

    async fn send(&self, to: &Inlet) -> Result<(), RuntimeError> {
        if !self.worker.config.peer_to_peer {
            return Err(RuntimeError::NoPeers("its operator did not permit transfers between workers"));
        }
        let failed = |error| errors::volume("stream a volume to another worker", self.handle, error);
        let (name, into) = (volumes::name(self.handle.to_string())?, volumes::name(to.volume.to_string())?);
        // An encoding that both workers support. Every worker supports gzip.
        let own = self.worker.encoding;
        let encoding = if own.as_str() == to.encoding { own } else { Encoding::Gzip };
        let url = P2pUrl::parse(&to.address).and_then(|url| url.stream_in(&into, &StreamIn::new(encoding)));
        let url = url.map_err(|_| RuntimeError::NoPeers("the address of the other worker is invalid"))?;
        match self.worker.volumes.stream_p2p_out(&name, "", &url, encoding).await {
            // An unreachable worker, or one that rejects the request, sends no more bytes.
            Err(error @ (Error::Transfer(_) | Error::Refused { .. } | Error::Unreachable(_))) => {
                Err(RuntimeError::Peer(domain::error_chain(&error)))
            }
            sent => sent.map_err(failed),
        }
    }
}
