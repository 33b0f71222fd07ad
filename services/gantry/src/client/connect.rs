//! Connection of a command to a cluster: the one of `--server`, or the one on this machine, which
//! is started if none runs.

use std::io::ErrorKind;
use std::time::Duration;

use anyhow::Context;
use rpc::Peer;
use rpc::client::{AddressError, Outgoing, listens, peer};
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::caches_client::CachesClient;
use rpc::pb::artifacts::collector_client::CollectorClient;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::owners_client::OwnersClient;
use rpc::pb::local::GetStatusRequest;
use rpc::pb::local::cluster_client::ClusterClient;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use rpc::pb::streamer::images_client::ImagesClient;
use rpc::pb::streamer::streamer_client::StreamerClient;
use tokio::sync::{Mutex, OnceCell};
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::cli::addresses::Addresses;
use crate::cli::args::Global;
use crate::client::token::{default_token, read_token};
use crate::cluster::{self, Paths};
use crate::ending::error::{Refused, refused, without_number};
use crate::render::ui::Ui;

/// Number of attempts of a transfer when calls break. The pauses are long enough for a restart of
/// the cluster.
pub(crate) const TRANSFER_TRIES: usize = 12;
/// Time for which an idempotent call is repeated.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time limit of one attempt of a call.
const DEADLINE: Duration = Duration::from_secs(10);
/// Duration of the first connection attempt before a warning is printed.
const WARN_AFTER: Duration = Duration::from_millis(800);
/// First pause between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Connection to the services of a cluster.
pub(crate) struct Connection {
    addresses: Addresses,
    outgoing: Outgoing,
    scheduler: Peer,
    artifacts: Peer,
    streamer: Peer,
    /// Proxy for calls to containers and volumes. `None`: the gateway of each worker is called.
    proxy: Option<Peer>,
    /// Paths of the cluster on this machine, if this is that cluster.
    local: Option<Paths>,
    /// Addresses of the process if it runs all services.
    aliases: OnceCell<Vec<String>>,
    /// Lock for restarting the cluster, so that several broken calls restart it only once.
    reviving: Mutex<()>,
    /// Team for which calls are made.
    pub(crate) team: String,
}

impl Connection {
    /// The option `--team`, with a space before it, for commands that a message shows. Empty for
    /// the default team.
    pub(crate) fn team_option(&self) -> String {
        if self.team == "main" { String::new() } else { format!(" --team {}", self.team) }
    }

    /// Connects to the cluster. Starts the cluster on this machine if it is used and does not run.
    pub(crate) async fn open(global: &Global, ui: &Ui) -> anyhow::Result<Self> {
        let named = named_token(global)?;
        let (addresses, local) = match &global.server {
            Some(server) => {
                let addresses = Addresses::parse(server).map_err(anyhow::Error::msg)?;
                warn_unless_listening(&addresses.scheduler, ui).await;
                (addresses, None)
            }
            None => {
                let paths = Paths::find()?;
                (Addresses::one(&cluster::ensure(&paths, ui).await?), Some(paths))
            }
        };
        let addresses = Addresses { proxy: global.proxy.clone().or(addresses.proxy), ..addresses };
        let token = match named {
            Some(named) => Some(named),
            None => default_token(&addresses)?.map(|(_, token)| token),
        };
        let outgoing = Outgoing::default().with_token(token.as_deref());
        let connection = Self::new(addresses, outgoing, global.team.clone())?;
        Ok(Self { local, ..connection })
    }

    fn new(addresses: Addresses, outgoing: Outgoing, team: String) -> Result<Self, AddressError> {
        let scheduler = peer(&addresses.scheduler, outgoing.clone())?;
        // Services at the same address share a connection.
        let reach = |address: &str| {
            if address == addresses.scheduler {
                Ok(scheduler.clone())
            } else {
                peer(address, outgoing.clone())
            }
        };
        Ok(Self {
            artifacts: reach(&addresses.artifacts)?,
            streamer: reach(&addresses.streamer)?,
            proxy: addresses.proxy.as_deref().map(reach).transpose()?,
            scheduler,
            addresses,
            outgoing,
            local: None,
            aliases: OnceCell::new(),
            reviving: Mutex::new(()),
            team,
        })
    }

    /// Connects to a cluster at `address`.
    #[cfg(test)]
    pub(crate) fn to(address: &str) -> Self {
        Self::new(Addresses::one(address), Outgoing::default(), "main".to_owned()).expect("an address")
    }

    /// Adds a proxy at `address`.
    #[cfg(test)]
    pub(crate) fn through(self, address: &str) -> Self {
        Self { proxy: Some(peer(address, self.outgoing.clone()).expect("an address")), ..self }
    }

    /// Returns a hint for messages about an unreachable worker.
    pub(crate) fn hint_at_proxies(&self) -> &'static str {
        match (&self.proxy, &self.local) {
            (None, None) => {
                "; if workers cannot be reached from this machine, give a proxy with --proxy or proxy=… in --server"
            }
            _ => "",
        }
    }

    /// Connects to the gateway at `endpoint`, or to the proxy.
    ///
    /// A cluster in one process may have several addresses: a socket, a TCP port, or a forwarded
    /// port. Its gateway is called at the address of the other services, whichever address the
    /// gateway itself names.
    pub(crate) async fn gateway(&self, endpoint: &str) -> anyhow::Result<Peer> {
        if let Some(proxy) = &self.proxy {
            return Ok(proxy.clone());
        }
        if let Some(address) = self.addresses.in_one_place()
            && (endpoint == address || self.is_alias(endpoint).await)
        {
            return Ok(self.scheduler.clone());
        }
        // The socket of a cluster requires no token, but other gateways do.
        let token = self.local.as_ref().and_then(|paths| read_token(&paths.token()).ok());
        let outgoing = match token {
            Some(token) => self.outgoing.clone().with_token(Some(&token)),
            None => self.outgoing.clone(),
        };
        peer(endpoint, outgoing).context("cannot use the address of the worker's gateway")
    }

    async fn is_alias(&self, endpoint: &str) -> bool {
        let asked = self.aliases.get_or_try_init(|| aliases(&self.scheduler)).await;
        // A process that does not answer may be another one.
        asked.is_ok_and(|aliases| aliases.iter().any(|alias| alias == endpoint))
    }

    /// Restarts the cluster on this machine if it has ended.
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
        WorkloadsClient::new(self.scheduler.clone())
    }

    pub(crate) fn placements(&self) -> PlacementsClient<Peer> {
        PlacementsClient::new(self.scheduler.clone())
    }

    pub(crate) fn workers(&self) -> WorkersClient<Peer> {
        WorkersClient::new(self.scheduler.clone())
    }

    pub(crate) fn artifacts(&self) -> ArtifactsClient<Peer> {
        ArtifactsClient::new(self.artifacts.clone())
    }

    pub(crate) fn owners(&self) -> OwnersClient<Peer> {
        OwnersClient::new(self.artifacts.clone())
    }

    pub(crate) fn caches(&self) -> CachesClient<Peer> {
        CachesClient::new(self.artifacts.clone())
    }

    pub(crate) fn inventory(&self) -> InventoryClient<Peer> {
        InventoryClient::new(self.artifacts.clone())
    }

    pub(crate) fn collector(&self) -> CollectorClient<Peer> {
        CollectorClient::new(self.artifacts.clone())
    }

    pub(crate) fn images(&self) -> ImagesClient<Peer> {
        ImagesClient::new(self.streamer.clone())
    }

    pub(crate) fn streamer(&self) -> StreamerClient<Peer> {
        StreamerClient::new(self.streamer.clone())
    }

    pub(crate) fn cluster(&self) -> ClusterClient<Peer> {
        ClusterClient::new(self.scheduler.clone())
    }

    pub(crate) async fn containers_at(&self, endpoint: &str) -> anyhow::Result<ContainersClient<Peer>> {
        Ok(ContainersClient::new(self.gateway(endpoint).await?))
    }

    pub(crate) async fn volumes_at(&self, endpoint: &str) -> anyhow::Result<VolumesClient<Peer>> {
        Ok(VolumesClient::new(self.gateway(endpoint).await?))
    }
}

/// Warns within a second if no service listens at `address`. The first call is repeated for
/// [`PATIENCE`], and then fails.
async fn warn_unless_listening(address: &str, ui: &Ui) {
    let advice = "check the address (--server or GANTRY_SERVER) and that the cluster runs there";
    let patience = PATIENCE.as_secs();
    match tokio::time::timeout(WARN_AFTER, listens(address)).await {
        Ok(Ok(())) => {}
        // The first call has a better message.
        Ok(Err(error)) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::InvalidInput) => {}
        Ok(Err(error)) => {
            let cause = without_number(&error.to_string());
            // The address is not repeated in the cause.
            let replica =
                format!("{}: ", address.trim_start_matches("http://").trim_start_matches("unix://"));
            let cause = cause.strip_prefix(&replica).unwrap_or(&cause);
            ui.warn(&format!("cannot reach {address}: {cause}; retrying for {patience} s; {advice}"));
        }
        Err(_) => ui.warn(&format!("{address} does not answer; retrying for {patience} s; {advice}")),
    }
}

/// Reads the addresses of the process behind `peer` if it is a cluster in one process.
pub(crate) async fn aliases(peer: &Peer) -> Result<Vec<String>, Status> {
    let asked = ClusterClient::new(peer.clone());
    let asked = async { asked.clone().get_status(GetStatusRequest {}).await };
    match tokio::time::timeout(DEADLINE, asked).await {
        Ok(Ok(status)) => Ok(status.into_inner().endpoints),
        Ok(Err(status)) if status.code() == Code::Unimplemented => Ok(Vec::new()),
        Ok(Err(status)) => Err(status),
        Err(_) => Err(Status::deadline_exceeded("no answer in time")),
    }
}

/// Makes an idempotent call, and repeats it for [`PATIENCE`] while the service does not answer.
pub(crate) async fn repeat<T>(
    doing: &str,
    mut call: impl AsyncFnMut() -> Result<tonic::Response<T>, Status>,
) -> anyhow::Result<T> {
    let mut give_up = None;
    let mut pause = Pause::default();
    loop {
        let answer = tokio::time::timeout(DEADLINE, call()).await;
        let status = match answer {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => status,
            Err(_) => Status::deadline_exceeded("no answer in time"),
        };
        // The first attempt may take long, so the time starts after it.
        let give_up = *give_up.get_or_insert_with(|| Instant::now() + PATIENCE);
        if !Refused::from(status.clone()).is_transient() || Instant::now() >= give_up {
            return Err(refused(doing)(status));
        }
        pause.wait().await;
    }
}

/// Pause between attempts, which doubles each time.
pub(crate) struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(FIRST_PAUSE)
    }
}

impl Pause {
    /// Sleeps for the pause, and doubles it.
    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(LONGEST_PAUSE);
    }
}

/// Reads the token of `--token-file`, if given.
pub(crate) fn named_token(global: &Global) -> anyhow::Result<Option<String>> {
    global.token_file.as_deref().map(read_token).transpose()
}

#[cfg(test)]
mod tests {
    use rpc::pb::runtime::AttachRequest;
    use tonic::service::RoutesBuilder;

    use super::*;

    /// Starts a server without services. Its answer `Unimplemented` proves that it was called.
    async fn empty_server(name: &str) -> (tempfile::TempDir, String, tokio::task::JoinSet<()>) {
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
    async fn proxy_replaces_gateway() {
        let (_kept, proxy, _serving) = empty_server("proxy").await;
        let connection = Connection::to("http://127.0.0.1:9");
        let attach = async |connection: &Connection| {
            let mut gateway = connection.containers_at("http://127.0.0.1:10").await.expect("an address");
            let requests = tokio_stream::iter([AttachRequest::default()]);
            gateway.attach(requests).await.expect_err("no service").code()
        };
        assert_eq!(attach(&connection).await, tonic::Code::Unavailable, "no server listens there");
        assert_eq!(
            attach(&connection.through(&proxy)).await,
            tonic::Code::Unimplemented,
            "the proxy was called"
        );
    }
}
