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
use tonic::{Code, Status};

use crate::cli::addresses::Addresses;
use crate::cli::args::Global;
use crate::client::outage::{Outage, Patience};
use crate::client::token::{default_token, read_token};
use crate::client::transfers::{Transfers, transfers};
use crate::cluster::{self, Paths};
use crate::ending::error::{Refused, without_number};
use crate::render::ui::Ui;

/// Time limit of one attempt of a call.
const DEADLINE: Duration = Duration::from_secs(10);
/// Duration of the first connection attempt before a warning is printed.
const WARN_AFTER: Duration = Duration::from_millis(800);

/// Service that a command calls.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Service {
    Scheduler,
    ArtifactStore,
    Streamer,
}

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
    /// Longest outages that the command waits out.
    pub(crate) patience: Patience,
    /// Printer of messages about outages.
    ui: Ui,
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
        let (named, patience) = (named_token(global)?, Patience::new(global.patience));
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
        Ok(Self { local, patience, ui: ui.without_events(), ..connection })
    }

    /// Connects to a cluster that runs, without counting as its use. `None`: no cluster runs on
    /// this machine.
    pub(crate) fn observe(global: &Global) -> anyhow::Result<Option<Self>> {
        let named = named_token(global)?;
        let (addresses, token) = match &global.server {
            Some(server) => {
                let addresses = Addresses::parse(server).map_err(anyhow::Error::msg)?;
                let default = if named.is_none() { default_token(&addresses)? } else { None };
                (addresses, default.map(|(_, token)| token))
            }
            None => {
                let paths = Paths::find()?;
                let Some(endpoint) = cluster::start::running(&paths) else { return Ok(None) };
                // The socket of the cluster requires no token, but other gateways do.
                (Addresses::one(&endpoint), read_token(&paths.token()).ok())
            }
        };
        let addresses = Addresses { proxy: global.proxy.clone().or(addresses.proxy), ..addresses };
        let outgoing = Outgoing::internal().with_token(named.or(token).as_deref());
        Ok(Some(Self::new(addresses, outgoing, global.team.clone())?))
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
            patience: Patience::new(None),
            ui: Ui::new(true),
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

    /// Whether transfers with the gateway at `endpoint` cross a network.
    pub(crate) async fn crosses_network(&self, endpoint: &str) -> bool {
        let called = match (&self.addresses.proxy, self.addresses.in_one_place()) {
            (Some(proxy), _) => proxy,
            (None, Some(address)) if endpoint != address && self.is_alias(endpoint).await => address,
            (None, _) => endpoint,
        };
        rpc::client::crosses_network(called)
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

    /// Makes an idempotent call, and repeats it while the service does not answer.
    pub(crate) async fn repeat<T>(
        &self,
        service: Service,
        doing: &str,
        mut call: impl AsyncFnMut() -> Result<tonic::Response<T>, Status>,
    ) -> anyhow::Result<T> {
        let mut outage = self.patience.of_call();
        loop {
            let refused = match self.call(service, call()).await {
                Ok(answer) => return Ok(answer),
                Err(refused) => refused,
            };
            if !refused.is_transient() || !outage.goes_on(None) {
                return Err(refused).with_context(|| doing.to_owned());
            }
            self.wait_out(&mut outage, &refused).await;
        }
    }

    /// Makes one attempt of a call.
    pub(crate) async fn call<T>(
        &self,
        service: Service,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, Refused> {
        let answer = tokio::time::timeout(DEADLINE, call).await;
        let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")));
        answer.map(tonic::Response::into_inner).map_err(|status| self.refused_by(service, status))
    }

    /// Pauses before the next attempt of an operation that failed, and restarts the cluster on this
    /// machine if it has ended. Prints a message if the outage is long.
    pub(crate) async fn wait_out(&self, outage: &mut Outage, refused: &Refused) {
        if let Some(patience) = outage.news() {
            self.ui.note(&format!("{}; retrying for {patience}", refused.outage()));
        }
        outage.pause().await;
        // The next attempt shows whether the cluster runs again.
        _ = self.revive(&self.ui).await;
    }

    /// Adds the service and its address to a failed call.
    pub(crate) fn refused_by(&self, service: Service, refused: impl Into<Refused>) -> Refused {
        let (name, address) = match service {
            _ if self.local.is_some() => return refused.into(),
            Service::Scheduler => ("scheduler", &self.addresses.scheduler),
            Service::ArtifactStore => ("artifact store", &self.addresses.artifacts),
            Service::Streamer => ("streamer", &self.addresses.streamer),
        };
        refused.into().by(format!("the {name} at {address}"))
    }

    /// Lists the transfers in progress, with the failure of a streamer that does not answer within
    /// `limit`.
    pub(crate) async fn transfers(&self, limit: Duration) -> Transfers {
        transfers(&self.addresses, &self.outgoing, limit).await
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

/// Warns within a second if no service listens at `address`. The first call is repeated, and then
/// fails.
async fn warn_unless_listening(address: &str, ui: &Ui) {
    let advice = "check the address (--server or GANTRY_SERVER) and that the cluster runs there";
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
            ui.warn(&format!("cannot reach {address}: {cause}; {advice}"));
        }
        Err(_) => ui.warn(&format!("{address} does not answer; {advice}")),
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
