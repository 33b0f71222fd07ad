//! Addresses of the services of a cluster: one address for all services, or one for each.
//!
//! A range of ports, `http://host:7110-7119`, stands for an unknown number of replicas. A container
//! engine that publishes ports of a range may give a restarted container another port of the range.

use std::net::IpAddr;

use rpc::client;

/// Addresses of each service: those of its replicas, separated by commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) scheduler: String,
    pub(crate) artifacts: String,
    pub(crate) streamer: String,
    /// Proxy that receives calls to containers and volumes. `None`: the gateway of each worker
    /// receives them.
    pub(crate) proxy: Option<String>,
    /// Ranges of ports. A silent address is ignored as long as another address of its range
    /// answers.
    pub(crate) ranges: Vec<Range>,
}

/// A range of ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Range {
    /// Text of the range on the command line.
    pub(crate) text: String,
    pub(crate) addresses: Vec<String>,
}

/// Maximum number of ports in a range.
const MAX_PORTS: u16 = 100;

impl Range {
    /// Parses a range. `Ok(None)`: `text` is not a range.
    fn parse(text: &str) -> Result<Option<Self>, String> {
        let ports = text.rsplit_once(':').and_then(|(host, ports)| Some((host, ports.split_once('-')?)));
        let Some((host, (first, last))) = ports else { return Ok(None) };
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else { return Ok(None) };
        if !(first..=first.saturating_add(MAX_PORTS - 1)).contains(&last) {
            return Err(format!("{text:?} is not a valid range; a range has 1 to {MAX_PORTS} ports"));
        }
        let addresses = (first..=last).map(|port| format!("{host}:{port}")).collect();
        Ok(Some(Self { text: text.to_owned(), addresses }))
    }
}

impl Addresses {
    /// Addresses of a cluster with all services at one address.
    pub(crate) fn one(address: &str) -> Self {
        let all = || address.to_owned();
        Self { scheduler: all(), artifacts: all(), streamer: all(), proxy: None, ranges: Vec::new() }
    }

    /// Returns the address of all services if they share one.
    pub(crate) fn in_one_place(&self) -> Option<&str> {
        let one = self.scheduler == self.artifacts && self.artifacts == self.streamer && self.proxy.is_none();
        one.then_some(self.scheduler.as_str())
    }

    /// Returns whether every address is on the loopback of this machine.
    pub(crate) fn are_on_loopback(&self) -> bool {
        let all = [&self.scheduler, &self.artifacts, &self.streamer].into_iter().chain(&self.proxy);
        all.flat_map(|addresses| addresses.split(',')).all(|address| is_on_loopback(address.trim()))
    }

    /// Parses `ADDRESS` or `scheduler=ADDRESS,artifacts=ADDRESS,streamer=ADDRESS,proxy=ADDRESS`.
    ///
    /// An address without a name is another replica of the service named before it. Addresses
    /// before the first name are the default of the services that are not named.
    /// `http://HOST:FIRST-LAST` stands for the replicas at these ports.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        const NAMES: [&str; 4] = ["scheduler", "artifacts", "streamer", "proxy"];
        let mut default = Vec::new();
        let mut named: [Vec<String>; 4] = Default::default();
        let mut ranges = Vec::new();
        let mut present = None;
        for item in text.split(',').map(str::trim) {
            let address = match item.split_once('=').filter(|(name, _)| !name.contains(':')) {
                Some((name, address)) => {
                    if name == "door" {
                        return Err("`door=` was renamed: use `proxy=`".to_owned());
                    }
                    let known = NAMES.iter().position(|known| *known == name);
                    let known = known
                        .ok_or_else(|| format!("{name:?} is not a service; write {}", NAMES.join(", ")))?;
                    if !named[known].is_empty() {
                        return Err(format!(
                            "{name} is named twice; write all its addresses after one {name}="
                        ));
                    }
                    present = Some(known);
                    address
                }
                None => item,
            };
            let replicas = match Range::parse(address)? {
                Some(range) => {
                    let replicas = range.addresses.join(",");
                    ranges.push(range);
                    replicas
                }
                None => address.to_owned(),
            };
            client::addresses(&replicas).map_err(|error| {
                suggestion(address).map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"))
            })?;
            present.map_or(&mut default, |at| &mut named[at]).push(replicas);
        }
        let [scheduler, artifacts, streamer, proxy] = named.map(|addresses| addresses.join(","));
        let default = default.join(",");
        let needed = [&scheduler, &artifacts, &streamer].into_iter().zip(NAMES);
        let missing: Vec<_> =
            needed.filter(|(address, _)| address.is_empty()).map(|(_, name)| name).collect();
        if default.is_empty() && !missing.is_empty() {
            let missing = missing.iter().map(|name| format!("{name}=ADDRESS")).collect::<Vec<_>>().join(",");
            return Err(format!("{missing} is missing; add it, or write an address for all services first"));
        }
        let or_default = |address: String| if address.is_empty() { default.clone() } else { address };
        Ok(Self {
            scheduler: or_default(scheduler),
            artifacts: or_default(artifacts),
            streamer: or_default(streamer),
            proxy: Some(proxy).filter(|proxy| !proxy.is_empty()),
            ranges,
        })
    }
}

fn is_on_loopback(address: &str) -> bool {
    let authority = address.strip_prefix("http://").unwrap_or_default().trim_end_matches('/');
    // The port is optional. IPv6 addresses always have brackets.
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => host,
        _ => authority,
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Suggests the address that the caller probably meant.
fn suggestion(address: &str) -> Option<String> {
    let http = |rest: &str| {
        let address = format!("http://{rest}");
        client::addresses(&address).ok()
    };
    if let Some(rest) = address.strip_prefix("https://") {
        let address = http(rest)?;
        return Some(format!("services do not support TLS; for an unencrypted connection, write {address}"));
    }
    if address.starts_with('/') {
        return Some(format!("did you mean unix://{address}?"));
    }
    let (_, port) = address.rsplit_once(':')?;
    let _: u16 = port.parse().ok()?;
    http(address).map(|address| format!("did you mean {address}?"))
}

/// Checks the value of `--server`, and returns it unchanged.
pub(crate) fn server(text: &str) -> Result<String, String> {
    Addresses::parse(text).map(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> [String; 4] {
        let Addresses { scheduler, artifacts, streamer, proxy, ranges: _ } =
            Addresses::parse(text).expect(text);
        [scheduler, artifacts, streamer, proxy.unwrap_or_default()]
    }

    #[test]
    fn address_is_shared_or_per_service() {
        assert_eq!(parsed("http://a:1"), ["http://a:1", "http://a:1", "http://a:1", ""]);
        assert_eq!(Addresses::parse("unix:///x").expect("parsed").in_one_place(), Some("unix:///x"));
        assert_eq!(
            parsed("scheduler=http://s:1,artifacts=http://a:1,streamer=http://t:1,proxy=http://d:1"),
            ["http://s:1", "http://a:1", "http://t:1", "http://d:1"]
        );
        assert_eq!(
            parsed("http://a:1,streamer=http://t:1,http://t:2"),
            ["http://a:1", "http://a:1", "http://t:1,http://t:2", ""]
        );
        assert_eq!(parsed("http://a:1, http://b:1")[0], "http://a:1,http://b:1");
        assert_eq!(Addresses::parse("http://a:1,proxy=http://d:1").expect("parsed").in_one_place(), None);
    }

    #[test]
    fn port_range_expands_to_addresses() {
        assert_eq!(
            parsed("http://a:1,scheduler=http://s:9-11,http://t:1"),
            ["http://s:9,http://s:10,http://s:11,http://t:1", "http://a:1", "http://a:1", ""]
        );
        let ranges = Addresses::parse("http://[::1]:7-7").expect("parsed").ranges;
        assert_eq!(
            ranges,
            [Range { text: "http://[::1]:7-7".to_owned(), addresses: vec!["http://[::1]:7".to_owned()] }]
        );
        for refused in ["http://a:2-1", "http://a:1-101", "http://a:65535-65534"] {
            assert!(Addresses::parse(refused).expect_err(refused).ends_with("a range has 1 to 100 ports"));
        }
        assert!(Addresses::parse("a:1-2").expect_err("no scheme").contains("cannot parse service address"));
    }

    #[test]
    fn only_addresses_of_this_machine_are_on_loopback() {
        let are = |text: &str| Addresses::parse(text).expect(text).are_on_loopback();
        for text in [
            "http://127.0.0.1:1",
            "http://127.0.0.1",
            "http://localhost:1/",
            "http://[::1]:1",
            "http://[::1]",
            "http://127.0.0.1:1-3,proxy=http://127.9.9.9:1",
        ] {
            assert!(are(text), "{text}");
        }
        for text in [
            "http://192.0.2.1:1",
            "http://[2001:db8::1]:1",
            "http://localhost.example:1",
            "http://127.0.0.1@192.0.2.1:1",
            "unix:///x",
            "http://127.0.0.1:1,http://192.0.2.1:1",
            "http://127.0.0.1:1,proxy=http://192.0.2.1:1",
        ] {
            assert!(!are(text), "{text}");
        }
    }

    #[test]
    fn missing_or_unknown_service_is_named() {
        let refused = |text: &str| Addresses::parse(text).expect_err(text);
        assert!(refused("scheduler=http://s:1").contains("artifacts=ADDRESS"));
        assert!(refused("shceduler=http://s:1").contains("\"shceduler\" is not a service; write scheduler"));
        assert!(refused("proxy=http://a:1,proxy=http://b:1,http://c").contains("twice"));
        assert!(refused("http://a:1,door=http://b:1").contains("use `proxy=`"));
        assert!(refused("nowhere").contains("cannot parse service address"));
        assert!(refused("").contains("cannot parse service address"));
    }

    #[test]
    fn probable_address_is_suggested() {
        let hint = |text: &str| Addresses::parse(text).expect_err(text);
        assert!(hint("a:1").ends_with("; did you mean http://a:1?"), "{}", hint("a:1"));
        assert!(hint("https://a:1").ends_with("for an unencrypted connection, write http://a:1"));
        assert!(hint("/run/x.sock").ends_with("; did you mean unix:///run/x.sock?"));
        for other in ["there", "unix:x", "http://a:1/path", "ftp://a:1"] {
            assert!(hint(other).ends_with("with commas between replicas"), "{}", hint(other));
        }
    }
}
