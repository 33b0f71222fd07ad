//! How the command reaches a cluster: the one it was told, or the one on this machine, which it starts when none runs.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use rpc::Peer;
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::collector_client::CollectorClient;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::owners_client::OwnersClient;
use rpc::pb::local::cluster_client::ClusterClient;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use rpc::pb::streamer::streamer_client::StreamerClient;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::Status;

use crate::args::Global;
use crate::cluster::{self, Paths};
use crate::error::{Refused, refused};
use crate::ui::Ui;

/// How long a call that may be repeated is repeated.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one try of a call may take.
const DEADLINE: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A cluster, as the command reaches it.
pub(crate) struct Connection {
    address: String,
    outgoing: Outgoing,
    peer: Peer,
    /// Where calls of containers and volumes go. `None`: to the gateway that attends the worker.
    door: Option<Peer>,
    /// Where the cluster is one of this machine that we may start.
    local: Option<Paths>,
    /// Held while it is started again: calls that broke together start it once.
    reviving: Mutex<()>,
    /// On whose behalf.
    pub(crate) team: String,
}

impl Connection {
    /// Finds the cluster, and starts one where that is the one on this machine and it does not run.
    pub(crate) async fn open(global: &Global, ui: &Ui) -> anyhow::Result<Self> {
        let token = global.token_file.as_deref().map(read_token).transpose()?;
        let outgoing = Outgoing::default().with_token(token.as_deref());
        let (address, local) = match &global.server {
            Some(address) => (address.clone(), None),
            None => {
                let paths = Paths::find()?;
                (cluster::ensure(&paths, ui).await?, Some(paths))
            }
        };
        let peer = peer(&address, outgoing.clone())?;
        let door = global.door.as_deref().map(|door| self::peer(door, outgoing.clone())).transpose()?;
        let team = global.team.clone();
        Ok(Self { address, outgoing, peer, door, local, reviving: Mutex::new(()), team })
    }

    /// The cluster at `address`.
    #[cfg(test)]
    pub(crate) fn to(address: &str) -> Self {
        let outgoing = Outgoing::default();
        let peer = peer(address, outgoing.clone()).expect("an address");
        let (address, team) = (address.to_owned(), "main".to_owned());
        Self { address, outgoing, peer, door: None, local: None, reviving: Mutex::new(()), team }
    }

    /// The same, with a door at `address`.
    #[cfg(test)]
    pub(crate) fn through(self, address: &str) -> Self {
        Self { door: Some(peer(address, self.outgoing.clone()).expect("an address")), ..self }
    }

    /// The gateway at `endpoint`, or the door that stands before it.
    ///
    /// All services of a local cluster have one address: whoever reached it over TCP finds its gateway there, too, though it
    /// names the socket.
    pub(crate) fn gateway(&self, endpoint: &str) -> anyhow::Result<Peer> {
        if let Some(door) = &self.door {
            return Ok(door.clone());
        }
        let same =
            endpoint == self.address || (endpoint.starts_with("unix:") && !self.address.starts_with("unix:"));
        if same {
            return Ok(self.peer.clone());
        }
        peer(endpoint, self.outgoing.clone())
            .context("the worker's gateway has an address that we cannot use")
    }

    /// Starts the cluster on this machine again if it has gone.
    pub(crate) async fn revive(&self, ui: &Ui) -> anyhow::Result<()> {
        match &self.local {
            Some(paths) => {
                let _reviving = self.reviving.lock().await;
                cluster::ensure(paths, ui).await.map(drop)
            }
            None => Ok(()),
        }
    }

    pub(crate) fn workloads(&self) -> WorkloadsClient<Peer> {
        WorkloadsClient::new(self.peer.clone())
    }

    pub(crate) fn placements(&self) -> PlacementsClient<Peer> {
        PlacementsClient::new(self.peer.clone())
    }

    pub(crate) fn workers(&self) -> WorkersClient<Peer> {
        WorkersClient::new(self.peer.clone())
    }

    pub(crate) fn artifacts(&self) -> ArtifactsClient<Peer> {
        ArtifactsClient::new(self.peer.clone())
    }

    pub(crate) fn owners(&self) -> OwnersClient<Peer> {
        OwnersClient::new(self.peer.clone())
    }

    pub(crate) fn inventory(&self) -> InventoryClient<Peer> {
        InventoryClient::new(self.peer.clone())
    }

    pub(crate) fn collector(&self) -> CollectorClient<Peer> {
        CollectorClient::new(self.peer.clone())
    }

    pub(crate) fn streamer(&self) -> StreamerClient<Peer> {
        StreamerClient::new(self.peer.clone())
    }

    pub(crate) fn cluster(&self) -> ClusterClient<Peer> {
        ClusterClient::new(self.peer.clone())
    }

    pub(crate) fn containers_at(&self, endpoint: &str) -> anyhow::Result<ContainersClient<Peer>> {
        Ok(ContainersClient::new(self.gateway(endpoint)?))
    }

    pub(crate) fn volumes_at(&self, endpoint: &str) -> anyhow::Result<VolumesClient<Peer>> {
        Ok(VolumesClient::new(self.gateway(endpoint)?))
    }
}

/// Makes a call that may be repeated, and repeats it for a while when nobody answers.
pub(crate) async fn repeat<T>(
    doing: &str,
    mut call: impl AsyncFnMut() -> Result<tonic::Response<T>, Status>,
) -> anyhow::Result<T> {
    let give_up = Instant::now() + PATIENCE;
    let mut pause = Pause::default();
    loop {
        let answer = tokio::time::timeout(DEADLINE, call()).await;
        let status = match answer {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => status,
            Err(_) => Status::deadline_exceeded("no answer in time"),
        };
        if !Refused::from(status.clone()).is_transient() || Instant::now() >= give_up {
            return Err(refused(doing)(status));
        }
        pause.wait().await;
    }
}

/// Pauses between tries, each longer than the one before.
pub(crate) struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(FIRST_PAUSE)
    }
}

impl Pause {
    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(LONGEST_PAUSE);
    }
}

fn read_token(file: &Path) -> anyhow::Result<String> {
    let token =
        std::fs::read_to_string(file).with_context(|| format!("cannot read the token in {file:?}"))?;
    match token.trim() {
        "" => bail!("{file:?} holds no token"),
        token => Ok(token.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use rpc::pb::runtime::AttachRequest;
    use tonic::service::RoutesBuilder;

    use super::*;

    /// Somebody who listens and serves nothing; what he answers says that he was asked.
    async fn somebody(name: &str) -> (tempfile::TempDir, String, tokio::task::JoinSet<()>) {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join(name);
        let listener = tokio::net::UnixListener::bind(&socket).expect("bound");
        let mut serving = tokio::task::JoinSet::new();
        let server = tonic::transport::Server::builder().add_routes(RoutesBuilder::default().routes());
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        serving.spawn(async move { server.serve_with_incoming(incoming).await.expect("served") });
        (directory, format!("unix://{}", socket.display()), serving)
    }

    #[tokio::test]
    async fn with_a_door_no_gateway_is_called_itself() {
        let (_kept, door, _serving) = somebody("door").await;
        let connection = Connection::to("http://127.0.0.1:9");
        let attach = async |connection: &Connection| {
            let mut gateway = connection.containers_at("http://127.0.0.1:10").expect("an address");
            let said = tokio_stream::iter([AttachRequest::default()]);
            gateway.attach(said).await.expect_err("nobody serves it").code()
        };
        assert_eq!(attach(&connection).await, tonic::Code::Unavailable, "nobody listens there");
        assert_eq!(
            attach(&connection.through(&door)).await,
            tonic::Code::Unimplemented,
            "the door was asked"
        );
    }
}
