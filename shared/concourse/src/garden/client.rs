//! The calls.

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

/// How patient a client is. The defaults are those of Concourse.
#[derive(Clone, Debug)]
pub struct Settings {
    /// For a call, with all its attempts; for Run and Attach, until the process's streams are open.
    pub request_timeout: Duration,
    /// For one attempt at a connection.
    pub connect_timeout: Duration,
    /// How long failed connections are tried anew; zero for one attempt. Only what the worker cannot have got, or what changes nothing, is
    /// sent again.
    pub retry_for: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        let minutes = Duration::from_mins(5);
        Self { request_timeout: minutes, connect_timeout: Duration::from_secs(30), retry_for: minutes }
    }
}

/// Of one worker's Garden server. Holds no connection.
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

/// Most bytes of the name of a container or process that every kind of worker takes.
const LONGEST_NAME: usize = 76;
/// Most bytes of the name of a property that every kind of worker takes. Its value has no such limit.
const LONGEST_KEY: usize = 2048;

/// A name that every kind of worker takes: letters and digits, with single `-`, `_` or `.` between.
fn named(name: &str) -> Result<(), Error> {
    let plain = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if name.len() > LONGEST_NAME || !name.split(['-', '_', '.']).all(plain) {
        return Err(Error::Refused("a name that not every kind of worker takes"));
    }
    Ok(())
}

fn key(name: &str) -> Result<(), Error> {
    if name.len() > LONGEST_KEY {
        return Err(Error::Refused("the name of a property is too long for some kinds of workers"));
    }
    Ok(())
}

fn body(value: &impl serde::Serialize) -> Result<Option<Bytes>, Error> {
    let bytes = serde_json::to_vec(value).map_err(|error| Error::Protocol(error.to_string()))?;
    Ok(Some(bytes.into()))
}

impl Client {
    /// Of the server at `address`, a host and a port.
    pub fn new(address: impl Into<String>, settings: Settings) -> Self {
        Self { address: address.into(), settings }
    }

    /// Whether the server, and on a containerd worker the daemon behind it, answers.
    pub async fn ping(&self) -> Result<(), Error> {
        self.done(Method::GET, "/ping".to_owned(), None).await
    }

    /// What the worker has.
    pub async fn capacity(&self) -> Result<Capacity, Error> {
        self.read(Method::GET, "/capacity".to_owned(), None).await
    }

    /// Handles of the containers that have `properties`, in no order. The surest way to learn whether a container exists.
    ///
    /// A containerd worker lists those that have *any* of them, and refuses an empty value.
    pub async fn list(&self, properties: &BTreeMap<String, String>) -> Result<Vec<String>, Error> {
        let filter = properties.iter().map(|(key, value)| format!("{}={}", encoded(key), encoded(value)));
        let filter = filter.collect::<Vec<_>>().join("&");
        let target =
            if filter.is_empty() { "/containers".to_owned() } else { format!("/containers?{filter}") };
        Ok(self.read::<Handles>(Method::GET, target, None).await?.handles)
    }

    /// Creates a container, and returns its handle. One that failed may exist all the same: destroy it.
    ///
    /// Names of it and of its properties that some kind of worker does not take are refused, and nothing is sent.
    pub async fn create(&self, spec: &ContainerSpec) -> Result<String, Error> {
        if !spec.handle.is_empty() {
            named(&spec.handle)?;
        }
        spec.properties.keys().try_for_each(|name| key(name))?;
        let created: Handle = self.read(Method::POST, "/containers".to_owned(), body(spec)?).await?;
        Ok(created.handle)
    }

    /// What is known of a container.
    pub async fn info(&self, handle: &str) -> Result<ContainerInfo, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "info"])?, None).await
    }

    /// What is known of each of `handles`.
    pub async fn bulk_info(
        &self,
        handles: &[&str],
    ) -> Result<BTreeMap<String, Result<ContainerInfo, Error>>, Error> {
        let entries: BTreeMap<String, InfoEntry> = self.bulk("bulk_info", handles).await?;
        let entry = |entry: InfoEntry| entry.error.map_or(Ok(entry.info), |error| Err(error.into_error(500)));
        Ok(entries.into_iter().map(|(handle, info)| (handle, entry(info))).collect())
    }

    /// What each of `handles` uses.
    pub async fn bulk_metrics(
        &self,
        handles: &[&str],
    ) -> Result<BTreeMap<String, Result<Metrics, Error>>, Error> {
        let entries: BTreeMap<String, MetricsEntry> = self.bulk("bulk_metrics", handles).await?;
        let entry =
            |entry: MetricsEntry| entry.error.map_or(Ok(entry.metrics), |error| Err(error.into_error(500)));
        Ok(entries.into_iter().map(|(handle, metrics)| (handle, entry(metrics))).collect())
    }

    /// Asks about `handles`. The server hangs up when asked about none.
    async fn bulk<T: DeserializeOwned>(
        &self,
        what: &str,
        handles: &[&str],
    ) -> Result<BTreeMap<String, T>, Error> {
        if handles.is_empty() {
            return Ok(BTreeMap::new());
        }
        if handles.iter().any(|handle| handle.is_empty() || handle.contains(',')) {
            return Err(Error::Refused("a handle that a list of handles cannot hold"));
        }
        let target = format!("/containers/{what}?handles={}", encoded(&handles.join(",")));
        self.read(Method::GET, target, None).await
    }

    /// Ends a container's processes, and removes it. While this is under way another attempt fails with [`Error::BeingDestroyed`].
    pub async fn destroy(&self, handle: &str) -> Result<(), Error> {
        self.done(Method::DELETE, call::path(&["containers", handle])?, None).await
    }

    /// Ends what was run in a container: with SIGTERM and after 10 s SIGKILL, or with SIGKILL at once. Returns when they are gone, or fails with
    /// [`Error::DoesNotEnd`] when they are not after 10 s more.
    pub async fn stop(&self, handle: &str, kill: bool) -> Result<(), Error> {
        let kill = body(&serde_json::json!({ "kill": kill }))?;
        self.done(Method::PUT, call::path(&["containers", handle, "stop"])?, kill).await
    }

    /// Destroys the container after `grace` without a call that names it. Zero would destroy it at once, and is refused.
    pub async fn set_grace_time(&self, handle: &str, grace: Duration) -> Result<(), Error> {
        if grace.is_zero() {
            return Err(Error::Refused("no grace at all destroys the container"));
        }
        let grace = i64::try_from(grace.as_nanos()).unwrap_or(i64::MAX);
        self.done(Method::PUT, call::path(&["containers", handle, "grace_time"])?, body(&grace)?).await
    }

    /// All properties of a container, and some of the server's own. A guardian worker has none for a container that does not exist.
    pub async fn properties(&self, handle: &str) -> Result<BTreeMap<String, String>, Error> {
        let target = call::path(&["containers", handle, "properties"])?;
        let properties: Option<_> = self.read(Method::GET, target, None).await?;
        Ok(properties.unwrap_or_default())
    }

    /// A property of a container, if it has it. A containerd worker has none with an empty value.
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

    /// Sets a property of a container. A name that is too long for some kind of worker is refused.
    pub async fn set_property(&self, handle: &str, name: &str, value: &str) -> Result<(), Error> {
        key(name)?;
        let target = call::path(&["containers", handle, "properties", name])?;
        self.done(Method::PUT, target, body(&serde_json::json!({ "value": value }))?).await
    }

    /// Removes a property of a container. Containerd workers do not implement it.
    pub async fn remove_property(&self, handle: &str, key: &str) -> Result<(), Error> {
        self.done(Method::DELETE, call::path(&["containers", handle, "properties", key])?, None).await
    }

    /// Limits of a container.
    pub async fn bandwidth_limits(&self, handle: &str) -> Result<BandwidthLimits, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "limits", "bandwidth"])?, None).await
    }

    /// Limits of a container.
    pub async fn cpu_limits(&self, handle: &str) -> Result<CpuLimits, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "limits", "cpu"])?, None).await
    }

    /// Limits of a container.
    pub async fn disk_limits(&self, handle: &str) -> Result<DiskLimits, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "limits", "disk"])?, None).await
    }

    /// Limits of a container.
    pub async fn memory_limits(&self, handle: &str) -> Result<MemoryLimits, Error> {
        self.read(Method::GET, call::path(&["containers", handle, "limits", "memory"])?, None).await
    }

    /// Runs a process. After an error of a connection that had been used it may run all the same: attach to its id.
    ///
    /// An id that some kind of worker does not take is refused, and nothing is sent.
    pub async fn run(&self, handle: &str, spec: &ProcessSpec) -> Result<Process, Error> {
        if !spec.id.is_empty() {
            named(&spec.id)?;
        }
        let target = call::path(&["containers", handle, "processes"])?;
        self.process(handle, Method::POST, target, body(spec)?, StatusCode::CREATED).await
    }

    /// Attaches to a process. What was written while nobody was attached may be gone.
    ///
    /// A success proves nothing on a containerd worker: once any process of the container has ended, it answers with the exit of the last
    /// that did, whatever was asked for. Between an end and that it fails with [`Error::EndedUnreaped`].
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

    /// Both streams of what a process writes, at once: a server that is full drops what is newest.
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
            // The process is there already, so nothing that fails from here on is as if it had not been sent.
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

    async fn done(&self, method: Method, target: String, body: Option<Bytes>) -> Result<(), Error> {
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
    fn lists_and_maps_that_are_null_are_empty() {
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
