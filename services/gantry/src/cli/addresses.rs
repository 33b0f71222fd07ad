//! Where the services of a cluster are: one address for all, or one for each.
//!
//! A range of ports, `http://host:7110-7119`, stands for replicas of which nobody knows how many there are just now: an engine that
//! publishes containers at ports of a range gives one that was started again another port of it.

use std::net::IpAddr;

use rpc::client;

/// Where each service is: addresses of its replicas, with commas between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) scheduler: String,
    pub(crate) artifacts: String,
    pub(crate) streamer: String,
    /// Where calls to containers and volumes go, instead of to the gateway that attends the worker. `None`: there.
    pub(crate) proxy: Option<String>,
    /// The ranges that were written, each with its addresses: one that does not answer is not missed while another of its range does.
    pub(crate) ranges: Vec<Range>,
}

/// A range of ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Range {
    /// As it was written.
    pub(crate) text: String,
    pub(crate) addresses: Vec<String>,
}

/// The most ports of a range.
const MOST: u16 = 100;

impl Range {
    /// `Ok(None)`: `text` is no range.
    fn parse(text: &str) -> Result<Option<Self>, String> {
        let ports = text.rsplit_once(':').and_then(|(host, ports)| Some((host, ports.split_once('-')?)));
        let Some((host, (first, last))) = ports else { return Ok(None) };
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else { return Ok(None) };
        if !(first..=first.saturating_add(MOST - 1)).contains(&last) {
            return Err(format!("{text:?} is no range of 1 to {MOST} ports"));
        }
        let addresses = (first..=last).map(|port| format!("{host}:{port}")).collect();
        Ok(Some(Self { text: text.to_owned(), addresses }))
    }
}

impl Addresses {
    /// All services at one address.
    pub(crate) fn one(address: &str) -> Self {
        let all = || address.to_owned();
        Self { scheduler: all(), artifacts: all(), streamer: all(), proxy: None, ranges: Vec::new() }
    }

    /// Whether all services are at one address, and which.
    pub(crate) fn in_one_place(&self) -> Option<&str> {
        let one = self.scheduler == self.artifacts && self.artifacts == self.streamer && self.proxy.is_none();
        one.then_some(self.scheduler.as_str())
    }

    /// Whether every address is on the loopback of this machine.
    pub(crate) fn are_on_loopback(&self) -> bool {
        let all = [&self.scheduler, &self.artifacts, &self.streamer].into_iter().chain(&self.proxy);
        all.flat_map(|addresses| addresses.split(',')).all(|address| is_on_loopback(address.trim()))
    }

    /// Parses `ADDRESS` or `scheduler=ADDRESS,artifacts=ADDRESS,streamer=ADDRESS,proxy=ADDRESS`. An address without a name belongs to the
    /// name before it, as another replica; those before any name are the default of the services that are not named. `http://HOST:FIRST-LAST`
    /// stands for whichever replicas there are at these ports.
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
                    let known = known.ok_or_else(|| format!("{name:?} is none of {}", NAMES.join(", ")))?;
                    if !named[known].is_empty() {
                        return Err(format!(
                            "{name} is named twice; write its addresses one after the other"
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
                meant(address).map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"))
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
            return Err(format!("{missing} is missing; write that, too, or an address for all in front"));
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
    // Without its port, which may be left out: no address of IPv6 is without brackets.
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => host,
        _ => authority,
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// What somebody probably meant who wrote what is no address.
fn meant(address: &str) -> Option<String> {
    let http = |rest: &str| {
        let address = format!("http://{rest}");
        client::addresses(&address).ok()
    };
    if let Some(rest) = address.strip_prefix("https://") {
        let address = http(rest)?;
        return Some(format!("services do not speak TLS: if nothing need be encrypted, write {address}"));
    }
    if address.starts_with('/') {
        return Some(format!("perhaps you mean unix://{address}"));
    }
    let (_, port) = address.rsplit_once(':')?;
    let _: u16 = port.parse().ok()?;
    http(address).map(|address| format!("perhaps you mean {address}"))
}

/// For the command line: the text, if it can be used.
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
    fn one_address_or_one_for_each() {
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
    fn a_range_of_ports_stands_for_its_addresses() {
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
            assert!(Addresses::parse(refused).expect_err(refused).ends_with("no range of 1 to 100 ports"));
        }
        assert!(Addresses::parse("a:1-2").expect_err("no scheme").contains("no address"));
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
    fn what_is_missing_or_unknown_is_said() {
        let refused = |text: &str| Addresses::parse(text).expect_err(text);
        assert!(refused("scheduler=http://s:1").contains("artifacts=ADDRESS"));
        assert!(refused("shceduler=http://s:1").contains("\"shceduler\" is none of scheduler"));
        assert!(refused("proxy=http://a:1,proxy=http://b:1,http://c").contains("twice"));
        assert!(refused("http://a:1,door=http://b:1").contains("use `proxy=`"));
        assert!(refused("nowhere").contains("no address"));
        assert!(refused("").contains("no address"));
    }

    #[test]
    fn what_was_probably_meant_is_said() {
        let hint = |text: &str| Addresses::parse(text).expect_err(text);
        assert!(hint("a:1").ends_with("; perhaps you mean http://a:1"), "{}", hint("a:1"));
        assert!(hint("https://a:1").ends_with("if nothing need be encrypted, write http://a:1"));
        assert!(hint("/run/x.sock").ends_with("; perhaps you mean unix:///run/x.sock"));
        for other in ["there", "unix:x", "http://a:1/path", "ftp://a:1"] {
            assert!(hint(other).ends_with("with commas between replicas"), "{}", hint(other));
        }
    }
}
