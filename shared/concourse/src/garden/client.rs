//! Requests to a Garden server.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::call;
use super::error::{Error, ErrorBody};
use super::messages::{
    BandwidthLimits, Capacity, ContainerInfo, ContainerSpec, CpuLimits, DiskLimits, MemoryLimits, Metrics,
    ProcessSpec, nullable,
};
use super::process::Process;
use crate::exchange::encoded;

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(16);

/// Timeouts of a client. The defaults are those of Concourse.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Timeout of a call with all its attempts. For Run and Attach, until the streams of the
    /// process are open.
    pub request_timeout: Duration,
    /// Timeout of one connection attempt.
    pub connect_timeout: Duration,
    /// Time for which failed connections are retried. Zero: one attempt. A request is repeated only
    /// if the worker cannot have received it, or if it changes nothing.
    pub retry_for: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        let minutes = Duration::from_mins(5);
        Self { request_timeout: minutes, connect_timeout: Duration::from_secs(30), retry_for: minutes }
    }
}

/// A client of one worker's Garden server. Has no open connection.
#[derive(Clone, Debug)]
pub struct Client {
    address: String,
    settings: Settings,
}

#[derive(Deserialize)]
struct Handles {
    #[serde(rename = "Handles", default, deserialize_with = "nullable")]
    handles: Vec<String>,
}

#[derive(Deserialize)]
struct Handle {
    #[serde(rename = "Handle")]
    handle: String,
}

#[derive(Deserialize)]
struct Value {
    value: String,
}

#[derive(Deserialize)]
struct InfoEntry {
    #[serde(rename = "Info", default, deserialize_with = "nullable")]
    info: ContainerInfo,
    #[serde(rename = "Err", default)]
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct MetricsEntry {
    #[serde(rename = "Metrics", default, deserialize_with = "nullable")]
    metrics: Metrics,
    #[serde(rename = "Err", default)]
    error: Option<ErrorBody>,
}

/// Longest name of a container or process, in bytes, that every kind of worker accepts.
const LONGEST_NAME: usize = 76;
/// Longest name of a property, in bytes, that every kind of worker accepts. The value has no such
/// limit.
const LONGEST_KEY: usize = 2048;

/// Checks that every kind of worker accepts a name: letters and digits, with single `-`, `_` or `.`
/// between them.
fn named(name: &str) -> Result<(), Error> {
    let plain = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if name.len() > LONGEST_NAME || !name.split(['-', '_', '.']).all(plain) {
        return Err(Error::Refused("some kinds of workers do not accept this name"));
    }
    Ok(())
}

fn key(name: &str) -> Result<(), Error> {
    if name.len() > LONGEST_KEY {
        return Err(Error::Refused("some kinds of workers do not accept a property name of this length"));
    }
    Ok(())
}

fn body(value: &impl serde::Serialize) -> Result<Option<Bytes>, Error> {
    let bytes = serde_json::to_vec(value).map_err(|error| Error::Protocol(error.to_string()))?;
    Ok(Some(bytes.into()))
}

impl Client {
    /// Creates a client of the server at `address`, a host and a port.
    pub fn new(address: impl Into<String>, settings: Settings) -> Self {
        Self { address: address.into(), settings }
    }

    /// Checks that the server answers, and on a containerd worker the daemon behind it.
    pub async fn ping(&self) -> Result<(), Error> {
        self.execute(Method::GET, "/ping".to_owned(), None).await
    }

    /// Returns the capacity of the worker.
    pub async fn capacity(&self) -> Result<Capacity, Error> {
        self.read(Method::GET, "/capacity".to_owned(), None).await
    }

    /// Lists the handles of the containers that have `properties`, unordered. This is the most
    /// reliable check whether a container exists.
    ///
    /// A containerd worker lists containers with *any* of the properties, and rejects an empty
    /// value.
    pub async fn list(&self, properties: &BTreeMap<String, String>) -> Result<Vec<String>, Error> {
        let filter = properties.iter().map(|(key, value)| format!("{}={}", encoded(key), encoded(value)));
        let filter = filter.collect::<Vec<_>>().join("&");
        let target =
            if filter.is_empty() { "/containers".to_owned() } else { format!("/containers?{filter}") };
        Ok(self.read::<Handles>(Method::GET, target, None).await?.handles)
    }

    /// Creates a container, and returns its handle. After an error the container may exist, so the
    /// caller must destroy it.
    ///
    /// Names that some kind of worker does not accept are rejected, and nothing is sent.
    pub async fn create(&self, spec: &ContainerSpec) -> Result<String, Error> {
        if !spec.handle.is_empty() {
            named(&spec.handle)?;
        }
        spec.properties.keys().try_for_each(|name| key(name))?;
        let created: Handle = self.read(Method::POST, "/containers".to_owned(), body(spec)?).await?;
        Ok(created.handle)
    }

    /// Returns information about a container.
    pub async fn info(&self, handle: &str) -> Result<ContainerInfo, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "info"])?, None).await
    }

    /// Returns information about each of `handles`.
    pub async fn bulk_info(
        &self,
        handles: &[&str],
    ) -> Result<BTreeMap<String, Result<ContainerInfo, Error>>, Error> {
        let entries: BTreeMap<String, InfoEntry> = self.bulk("bulk_info", handles).await?;
        let entry = |entry: InfoEntry| entry.error.map_or(Ok(entry.info), |error| Err(error.into_error(500)));
        Ok(entries.into_iter().map(|(handle, info)| (handle, entry(info))).collect())
    }

    /// Returns the resource usage of each of `handles`.
    pub async fn bulk_metrics(
        &self,
        handles: &[&str],
    ) -> Result<BTreeMap<String, Result<Metrics, Error>>, Error> {
        let entries: BTreeMap<String, MetricsEntry> = self.bulk("bulk_metrics", handles).await?;
        let entry =
            |entry: MetricsEntry| entry.error.map_or(Ok(entry.metrics), |error| Err(error.into_error(500)));
        Ok(entries.into_iter().map(|(handle, metrics)| (handle, entry(metrics))).collect())
    }

    /// Makes a bulk request. The server closes the connection if the list is empty.
    async fn bulk<T: DeserializeOwned>(
        &self,
        what: &str,
        handles: &[&str],
    ) -> Result<BTreeMap<String, T>, Error> {
        if handles.is_empty() {
            return Ok(BTreeMap::new());
        }
        if handles.iter().any(|handle| handle.is_empty() || handle.contains(',')) {
            return Err(Error::Refused("a handle in a list must not be empty or contain a comma"));
        }
        let target = format!("/containers/{what}?handles={}", encoded(&handles.join(",")));
        self.read(Method::GET, target, None).await
    }

    /// Kills the processes of a container, and removes it. Meanwhile another attempt fails with
    /// [`Error::BeingDestroyed`].
    pub async fn destroy(&self, handle: &str) -> Result<(), Error> {
        self.execute(Method::DELETE, call::path(&["containers", handle])?, None).await
    }

    /// Stops the processes of a container, with SIGTERM and after 10 s SIGKILL, or with SIGKILL at
    /// once. Returns when all have ended. Fails with [`Error::DoesNotEnd`] if some still run 10 s
    /// later.
    pub async fn stop(&self, handle: &str, kill: bool) -> Result<(), Error> {
        let kill = body(&serde_json::json!({ "kill": kill }))?;
        self.execute(Method::PUT, call::path(&["containers", handle, "stop"])?, kill).await
    }

    /// Sets the time without a call that names the container, after which the server destroys it.
    /// Zero would destroy it at once, and is rejected.
    pub async fn set_grace_time(&self, handle: &str, grace: Duration) -> Result<(), Error> {
        if grace.is_zero() {
            return Err(Error::Refused("a grace time of zero would destroy the container"));
        }
        let grace = i64::try_from(grace.as_nanos()).unwrap_or(i64::MAX);
        self.execute(Method::PUT, call::path(&["containers", handle, "grace_time"])?, body(&grace)?).await
    }

    /// Returns all properties of a container, including some of the server. A guardian worker
    /// returns none for a container that does not exist.
    pub async fn properties(&self, handle: &str) -> Result<BTreeMap<String, String>, Error> {
        let target = call::path(&["containers", handle, "properties"])?;
        let properties: Option<_> = self.read(Method::GET, target, None).await?;
        Ok(properties.unwrap_or_default())
    }

    /// Returns a property of a container, if it exists. A containerd worker stores no empty values.
    pub async fn property(&self, handle: &str, key: &str) -> Result<Option<String>, Error> {
        let target = call::path(&["containers", handle, "properties", key])?;
        match self.read::<Value>(Method::GET, target, None).await {
            Ok(property) => Ok(Some(property.value)),
            Err(Error::Other { message, .. })
                if [format!("not found: {key}"), format!("property does not exist: {key}")]
                    .contains(&message) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Sets a property of a container. A name that is too long for some kind of worker is rejected.
    pub async fn set_property(&self, handle: &str, name: &str, value: &str) -> Result<(), Error> {
        key(name)?;
        let target = call::path(&["containers", handle, "properties", name])?;
        self.execute(Method::PUT, target, body(&serde_json::json!({ "value": value }))?).await
    }

    /// Removes a property of a container. Containerd workers do not implement this.
    pub async fn remove_property(&self, handle: &str, key: &str) -> Result<(), Error> {
        self.execute(Method::DELETE, call::path(&["containers", handle, "properties", key])?, None).await
    }

    /// Returns the bandwidth limits of a container.
    pub async fn bandwidth_limits(&self, handle: &str) -> Result<BandwidthLimits, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "limits", "bandwidth"])?, None).await
    }

    /// Returns the CPU limits of a container.
    pub async fn cpu_limits(&self, handle: &str) -> Result<CpuLimits, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "limits", "cpu"])?, None).await
    }

    /// Returns the disk limits of a container.
    pub async fn disk_limits(&self, handle: &str) -> Result<DiskLimits, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "limits", "disk"])?, None).await
    }

    /// Returns the memory limits of a container.
    pub async fn memory_limits(&self, handle: &str) -> Result<MemoryLimits, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "limits", "memory"])?, None).await
    }

    /// Runs a process. If a used connection failed, the process may run: the caller should attach
    /// to its id.
    ///
    /// An id that some kind of worker does not accept is rejected, and nothing is sent.
    pub async fn run(&self, handle: &str, spec: &ProcessSpec) -> Result<Process, Error> {
        if !spec.id.is_empty() {
            named(&spec.id)?;
        }
        let target = call::path(&["containers", handle, "processes"])?;
        self.process(handle, Method::POST, target, body(spec)?, StatusCode::CREATED).await
    }

    /// Attaches to a process. Output that was written without an attachment may be lost.
    ///
    /// On a containerd worker a success proves nothing. Once any process of the container has
    /// ended, the worker answers every attach with the exit of the process that ended last. Between
    /// the end of a process and its reaping, the call fails with [`Error::EndedUnreaped`].
    pub async fn attach(&self, handle: &str, process: &str) -> Result<Process, Error> {
        let target = call::path(&["containers", handle, "processes", process])?;
        self.process(handle, Method::GET, target, None, StatusCode::OK).await
    }

    async fn process(
        &self,
        handle: &str,
        method: Method,
        target: String,
        body: Option<Bytes>,
        expected: StatusCode,
    ) -> Result<Process, Error> {
        let sent = AtomicBool::new(false);
        self.in_time(&sent, async {
            let until = Instant::now() + self.settings.retry_for;
            let mut stream = self.connect(until).await?;
            sent.store(true, Ordering::Relaxed);
            let beyond =
                call::take_over(&mut stream, &self.address, &method, &target, body.as_ref(), expected)
                    .await?;
            Process::open(stream, beyond, |process, stream| self.output_streams(handle, process, stream))
                .await
        })
        .await
    }

    /// Opens both output streams at once, because a server with a full buffer drops new output.
    async fn output_streams(
        &self,
        handle: &str,
        process: String,
        stream: String,
    ) -> Result<[(TcpStream, bytes::BytesMut); 2], Error> {
        let until = Instant::now() + self.settings.retry_for;
        let open = async |name| {
            let target =
                call::path(&["containers", handle, "processes", &process, "attaches", &stream, name])?;
            // The process exists already, so a later error must not count as unsent.
            let mut stream = self.connect(until).await.map_err(|error| match error {
                Error::Connection { source, .. } => Error::broken(source),
                other => other,
            })?;
            let beyond =
                call::take_over(&mut stream, &self.address, &Method::GET, &target, None, StatusCode::OK)
                    .await?;
            Ok((stream, beyond))
        };
        let (stdout, stderr) = tokio::try_join!(open("stdout"), open("stderr"))?;
        Ok([stdout, stderr])
    }

    async fn connect(&self, until: Instant) -> Result<TcpStream, Error> {
        let mut pause = FIRST_PAUSE;
        loop {
            match call::connect(&self.address, self.settings.connect_timeout).await {
                Err(_) if Instant::now() + pause < until => tokio::time::sleep(pause).await,
                connected => return connected,
            }
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }

    async fn execute(&self, method: Method, target: String, body: Option<Bytes>) -> Result<(), Error> {
        self.read::<IgnoredAny>(method, target, body).await.map(|_| ())
    }

    async fn read<T: DeserializeOwned>(
        &self,
        method: Method,
        target: String,
        body: Option<Bytes>,
    ) -> Result<T, Error> {
        let answer = self.call(&method, &target, body.as_ref()).await?;
        serde_json::from_slice(&answer)
            .map_err(|error| Error::Protocol(format!("{method} {target}: {error}")))
    }

    async fn call(&self, method: &Method, target: &str, body: Option<&Bytes>) -> Result<Bytes, Error> {
        let sent = AtomicBool::new(false);
        self.in_time(&sent, async {
            let until = Instant::now() + self.settings.retry_for;
            let mut pause = FIRST_PAUSE;
            loop {
                let stream = self.connect(until).await?;
                sent.store(true, Ordering::Relaxed);
                match call::call(stream, &self.address, method, target, body).await {
                    Err(Error::Connection { .. })
                        if method == Method::GET && Instant::now() + pause < until =>
                    {
                        tokio::time::sleep(pause).await;
                    }
                    answered => return answered,
                }
                pause = LONGEST_PAUSE.min(pause * 2);
            }
        })
        .await
    }

    async fn in_time<T>(
        &self,
        sent: &AtomicBool,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(self.settings.request_timeout, call).await {
            Ok(answered) => answered,
            Err(_) => Err(Error::timed_out(sent.load(Ordering::Relaxed))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_lists_and_maps_parse_as_empty() {
        let handles: Handles = serde_json::from_str(r#"{"Handles":null}"#).unwrap();
        assert!(handles.handles.is_empty());
        let json =
            r#"{"State":"active","Events":null,"ProcessIDs":null,"Properties":null,"MappedPorts":null}"#;
        let entries: BTreeMap<String, InfoEntry> =
            serde_json::from_str(&format!(r#"{{"c":{{"Info":{json},"Err":null}},"d":{{"Info":null,"Err":{{"Type":"ContainerNotFoundError"}}}}}}"#)).unwrap();
        let (found, missing) = (&entries["c"], &entries["d"]);
        assert!(found.error.is_none() && found.info.state == "active");
        assert!(found.info.events.is_empty() && found.info.properties.is_empty());
        assert!(found.info.process_ids.is_empty() && found.info.mapped_ports.is_empty());
        assert!(missing.error.is_some());
        let metrics: MetricsEntry =
            serde_json::from_str(r#"{"Metrics":{"NetworkStat":null,"PidStat":null,"Age":1},"Err":null}"#)
                .unwrap();
        assert_eq!((metrics.metrics.network, metrics.metrics.age), (None, 1));
    }
}
