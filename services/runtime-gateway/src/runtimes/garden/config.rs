//! Configuration of the Concourse workers of a gateway: flags and a file.
//!
//! An entry of the file has the format of a Concourse worker's registration. The keys `addr` and
//! `baggageclaim_url` are aliases of `garden` and `baggageclaim`. Unknown keys are ignored.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use concourse::baggageclaim::Encoding;
use serde::{Deserialize, Deserializer};

use super::{GardenConfig, ProvidedImage};
use crate::{Amounts, Config};

/// Concourse workers of this gateway.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct GardenArgs {
    /// Speak for the Concourse worker whose Garden server has this address
    #[arg(long, env = "GANTRY_GARDEN", value_name = "HOST:PORT", requires = "baggageclaim")]
    pub garden: Option<String>,
    /// Address of the Baggageclaim server of that worker
    #[arg(long, env = "GANTRY_BAGGAGECLAIM", value_name = "HOST:PORT", requires = "garden")]
    pub baggageclaim: Option<String>,
    /// Speak for the Concourse workers in this JSON file: a list of objects with `name`, `garden`,
    /// `baggageclaim`, and optionally `platform`, `tags`, `team`, `max_tasks`, `max_containers`,
    /// `max_volumes`, `cpu`, `memory`, `encoding`, `peer_to_peer`. The registration of a Concourse
    /// worker is a valid entry, with its resource types, certificates and proxies
    #[arg(long, env = "GANTRY_WORKERS_FILE", value_name = "FILE")]
    pub workers_file: Option<PathBuf>,
    /// Compression of archives to and from the worker given by --baggageclaim: raw, gzip, zstd or
    /// s2. Default: the best that the worker supports. The key in the file is `encoding`
    #[arg(long, env = "GANTRY_BAGGAGECLAIM_ENCODING", value_name = "ENCODING", requires = "baggageclaim")]
    pub baggageclaim_encoding: Option<Encoding>,
    /// Let the Concourse workers of this gateway send volumes directly to each other, and to those
    /// of other gateways with this option. Use it only if the workers reach each other at the
    /// address of their `/p2p-url`, and no other machine does: Baggageclaim has no authentication
    #[arg(long, env = "GANTRY_PEER_TO_PEER", value_parser = clap::builder::BoolishValueParser::new())]
    pub peer_to_peer: bool,
}

/// A Concourse worker in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct GardenWorker {
    /// The name, unique in the cluster.
    #[serde(default)]
    pub name: String,
    /// Address of the Garden server.
    #[serde(alias = "addr")]
    pub garden: String,
    /// Address of the Baggageclaim server: a host and a port, or a URL.
    #[serde(alias = "baggageclaim_url")]
    pub baggageclaim: String,
    /// Platform. Default: `linux`.
    #[serde(default, deserialize_with = "nullable")]
    pub platform: String,
    /// Tags. A worker with tags takes only workloads with tags.
    #[serde(default, deserialize_with = "nullable")]
    pub tags: Vec<String>,
    /// The only team that may use the worker. Empty: every team.
    #[serde(default, deserialize_with = "nullable")]
    pub team: String,
    /// Zone of the worker. Empty: the value of the flag.
    #[serde(default, deserialize_with = "nullable")]
    pub zone: String,
    /// Limits and capacity of the worker.
    #[serde(flatten)]
    pub amounts: Amounts,
    /// Whether the worker is pruned automatically once it is lost.
    #[serde(default, deserialize_with = "nullable")]
    pub ephemeral: bool,
    /// Compression of archives. Default: the best that the worker supports.
    #[serde(default)]
    pub encoding: Option<Encoding>,
    /// Whether the worker exchanges volumes directly with other such workers. Default: the value of
    /// the flag.
    #[serde(default)]
    pub peer_to_peer: Option<bool>,
    /// A directory of the worker with certificates, which every container gets.
    #[serde(default, deserialize_with = "nullable")]
    pub certs_path: String,
    /// HTTP proxy of every process.
    #[serde(default, deserialize_with = "nullable")]
    pub http_proxy_url: String,
    /// HTTPS proxy of every process.
    #[serde(default, deserialize_with = "nullable")]
    pub https_proxy_url: String,
    /// Hosts that processes reach without a proxy.
    #[serde(default, deserialize_with = "nullable")]
    pub no_proxy: String,
    /// Images that the worker provides.
    #[serde(default, deserialize_with = "nullable")]
    pub resource_types: Vec<AdvertisedType>,
}

/// An image that a Concourse worker provides, as in its registration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AdvertisedType {
    /// The name of the resource type.
    #[serde(rename = "type")]
    pub kind: String,
    /// The archive on the worker.
    pub image: String,
    /// The version of the image.
    #[serde(default, deserialize_with = "nullable")]
    pub version: String,
}

impl AdvertisedType {
    fn provided_image(&self) -> ProvidedImage {
        ProvidedImage { name: self.kind.clone(), version: self.version.clone(), path: self.image.clone() }
    }
}

/// Parses `null` as the empty value.
fn nullable<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    Several(Vec<GardenWorker>),
    One(Box<GardenWorker>),
}

/// Parses an address or a URL into a host and a port.
fn address(text: &str) -> anyhow::Result<String> {
    let rest = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    let port = rest.rsplit_once(':').and_then(|(host, port)| (!host.is_empty()).then_some(port));
    ensure!(
        port.is_some_and(|port| port.parse::<u16>().is_ok()) && !rest.contains('/'),
        "cannot parse the worker address {text:?}: expected a host and a port"
    );
    Ok(rest.to_owned())
}

impl GardenArgs {
    /// Whether any worker is configured.
    #[must_use]
    pub fn any(&self) -> bool {
        self.garden.is_some() || self.workers_file.is_some()
    }

    /// Reads the configured workers. `given` has the values of the flags for the worker that is
    /// given by flags.
    ///
    /// # Errors
    ///
    /// The file cannot be read, an address is invalid, or two workers have the same name.
    pub fn workers(&self, given: GardenWorker) -> anyhow::Result<Vec<GardenWorker>> {
        let mut workers = match &self.workers_file {
            Some(path) => read(path)?,
            None => Vec::new(),
        };
        if let (Some(garden), Some(baggageclaim)) = (&self.garden, &self.baggageclaim) {
            workers.push(GardenWorker {
                garden: garden.clone(),
                baggageclaim: baggageclaim.clone(),
                encoding: self.baggageclaim_encoding,
                ..given
            });
        }
        for worker in &mut workers {
            ensure!(!worker.name.is_empty(), "cannot use the worker at {}: it has no name", worker.garden);
            worker.garden = address(&worker.garden)?;
            worker.baggageclaim = address(&worker.baggageclaim)?;
            let types = &worker.resource_types;
            for (i, known) in types.iter().enumerate() {
                if types[..i].iter().any(|other| other.kind == known.kind) {
                    bail!(
                        "cannot use worker {:?}: it has two images for the resource type {:?}",
                        worker.name,
                        known.kind
                    );
                }
            }
            worker.peer_to_peer.get_or_insert(self.peer_to_peer);
        }
        for (i, worker) in workers.iter().enumerate() {
            if workers[..i].iter().any(|other| other.name == worker.name) {
                bail!("cannot use worker {:?}: two workers have this name", worker.name);
            }
        }
        Ok(workers)
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<GardenWorker>> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file: File = serde_json::from_slice(&text)
        .with_context(|| format!("cannot parse the list of workers in {}", path.display()))?;
    Ok(match file {
        File::Several(workers) => workers,
        File::One(worker) => vec![*worker],
    })
}

impl GardenWorker {
    /// Settings of the gateway for this worker. `common` has the settings that all workers share.
    /// State of the worker is stored below `<state directory>/<name>`.
    #[must_use]
    pub fn config(&self, common: &Config, state_dir: &Path) -> (Config, GardenConfig) {
        let state_dir = state_dir.join(&self.name);
        let config = Config {
            worker_name: self.name.clone(),
            platform: if self.platform.is_empty() { "linux".to_owned() } else { self.platform.clone() },
            tags: self.tags.clone(),
            team: Some(self.team.clone()).filter(|team| !team.is_empty()),
            zone: if self.zone.is_empty() { common.zone.clone() } else { self.zone.clone() },
            amounts: self.amounts.clone(),
            ephemeral: self.ephemeral || common.ephemeral,
            manifest_dir: state_dir.join("manifests"),
            ..common.clone()
        };
        let proxies = [
            ("http_proxy", &self.http_proxy_url),
            ("https_proxy", &self.https_proxy_url),
            ("no_proxy", &self.no_proxy),
        ];
        let environment = proxies.into_iter().filter(|(_, value)| !value.is_empty());
        let garden = GardenConfig {
            environment: environment.map(|(name, value)| (name.to_owned(), value.clone())).collect(),
            certs_path: Some(self.certs_path.clone()).filter(|path| !path.is_empty()),
            encoding: self.encoding,
            resource_types: self.resource_types.iter().map(AdvertisedType::provided_image).collect(),
            peer_to_peer: self.peer_to_peer == Some(true),
            ..GardenConfig::new(&self.garden, &self.baggageclaim, state_dir)
        };
        (config, garden)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn file(text: &str) -> anyhow::Result<Vec<GardenWorker>> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("workers.json");
        std::fs::write(&path, text)?;
        let args = GardenArgs { workers_file: Some(path), ..GardenArgs::default() };
        args.workers(GardenWorker::default())
    }

    #[test]
    fn registration_of_concourse_worker_is_a_valid_entry() -> anyhow::Result<()> {
        let workers = file(
            r#"{"addr":"10.0.0.7:7777","baggageclaim_url":"http://10.0.0.7:7788","certs_path":"/etc/ssl/certs",
             "http_proxy_url":"http://proxy:3128","no_proxy":"localhost","active_containers":2,"active_volumes":3,
             "resource_types":[{"type":"git","image":"/opt/git/rootfs.tgz","version":"1","privileged":false}],
             "platform":"linux","tags":null,"team":"","name":"w1","start_time":1,"ephemeral":true,"state":"running"}"#,
        )?;
        let [worker] = &workers[..] else { panic!("{workers:?}") };
        assert_eq!((worker.name.as_str(), worker.garden.as_str()), ("w1", "10.0.0.7:7777"));
        assert_eq!(worker.baggageclaim, "10.0.0.7:7788");
        assert_eq!(worker.resource_types[0].image, "/opt/git/rootfs.tgz");
        let common = Config {
            worker_name: String::new(),
            platform: String::new(),
            tags: vec!["another".to_owned()],
            team: Some("another".to_owned()),
            zone: "north".to_owned(),
            amounts: Amounts::default(),
            ephemeral: false,
            endpoint: "http://gateway".to_owned(),
            scheduler: "http://scheduler".to_owned(),
            artifact_store: "http://store".to_owned(),
            streamer: "http://streamer".to_owned(),
            token: None,
            manifest_dir: PathBuf::new(),
            report_interval: Duration::from_secs(60),
            scrub_bytes_per_second: 0,
            destroy_concurrency: 8,
            intervals: crate::Intervals::default(),
            hold_destruction: false,
        };
        let (config, garden) = worker.config(&common, Path::new("/state"));
        assert!(config.ephemeral);
        assert_eq!((config.worker_name.as_str(), config.team, config.tags.len()), ("w1", None, 0));
        assert_eq!(config.zone, "north", "the entry has none");
        assert_eq!(config.manifest_dir, Path::new("/state/w1/manifests"));
        let environment: Vec<_> = garden.environment.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(environment, ["http_proxy", "no_proxy"]);
        assert_eq!(garden.certs_path.as_deref(), Some("/etc/ssl/certs"));
        let [git] = &garden.resource_types[..] else { panic!("{:?}", garden.resource_types) };
        assert_eq!((&*git.name, &*git.version, &*git.path), ("git", "1", "/opt/git/rootfs.tgz"));
        assert_eq!(garden.encoding, None);
        assert_eq!(config.amounts, Amounts::default());
        Ok(())
    }

    #[test]
    fn workers_have_separate_limits_and_amounts() -> anyhow::Result<()> {
        let workers = file(
            r#"[{"name":"one","garden":"h:1","baggageclaim":"h:2","max_tasks":1,"max_containers":2,"max_volumes":3,
                 "cpu":"1.5","memory":"2G"},
                {"name":"two","garden":"h:3","baggageclaim":"h:4","max_tasks":4}]"#,
        )?;
        let common = Config {
            amounts: Amounts { max_volumes: Some(9), ..Amounts::default() },
            ..Config::for_worker("", "", "", "", "", PathBuf::new())
        };
        let amounts: Vec<_> =
            workers.iter().map(|worker| worker.config(&common, Path::new("/state")).0.amounts).collect();
        let one = Amounts {
            max_tasks: Some(1),
            max_containers: Some(2),
            max_volumes: Some(3),
            cpu_millis: Some(1500),
            memory_bytes: Some(2 << 30),
            ..Amounts::default()
        };
        assert_eq!(amounts, [one, Amounts { max_tasks: Some(4), ..Amounts::default() }]);
        Ok(())
    }

    #[test]
    fn peer_transfers_require_the_setting() -> anyhow::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("workers.json");
        let entry = |name: &str, more: &str| {
            format!(r#"{{"name":"{name}","garden":"h:1","baggageclaim":"h:7788"{more}}}"#)
        };
        let [silent, yes, no] =
            [("silent", ""), ("yes", r#","peer_to_peer":true"#), ("no", r#","peer_to_peer":false"#)]
                .map(|(name, more)| entry(name, more));
        std::fs::write(&path, format!("[{silent},{yes},{no}]"))?;
        for flag in [false, true] {
            let args = GardenArgs {
                workers_file: Some(path.clone()),
                garden: Some("h:1".to_owned()),
                baggageclaim: Some("h:2".to_owned()),
                peer_to_peer: flag,
                ..GardenArgs::default()
            };
            let given = GardenWorker { name: "given".to_owned(), ..GardenWorker::default() };
            let common = Config::for_worker("", "", "", "", "", PathBuf::new());
            let enabled: Vec<_> = args
                .workers(given)?
                .iter()
                .map(|worker| worker.config(&common, Path::new("/state")).1.peer_to_peer)
                .collect();
            assert_eq!(enabled, [flag, true, false, flag]);
        }
        Ok(())
    }

    #[test]
    fn names_and_addresses_are_validated() -> anyhow::Result<()> {
        let entry = |name: &str, garden: &str| {
            format!(
                r#"{{"name":"{name}","garden":"{garden}","baggageclaim":"h:7788","team":"a","tags":["t"]}}"#
            )
        };
        let workers = file(&format!("[{},{}]", entry("one", "h:1"), entry("two", "[::1]:2")))?;
        assert_eq!(workers.len(), 2);
        for bad in [
            format!("[{},{}]", entry("one", "h:1"), entry("one", "h:2")),
            format!("[{}]", entry("", "h:1")),
            format!("[{}]", entry("one", "h")),
            format!("[{}]", entry("one", ":1")),
            format!("[{}]", entry("one", "https://h:1/x")),
            "{}".to_owned(),
            r#"{"name":"one","garden":"h:1","baggageclaim":"h:2","encoding":"brotli"}"#.to_owned(),
            r#"{"name":"one","garden":"h:1","baggageclaim":"h:2","memory":"much"}"#.to_owned(),
            r#"{"name":"one","garden":"h:1","baggageclaim":"h:2",
                "resource_types":[{"type":"git","image":"/a"},{"type":"git","image":"/b"}]}"#
                .to_owned(),
        ] {
            assert!(file(&bad).is_err(), "{bad}");
        }
        Ok(())
    }
}
