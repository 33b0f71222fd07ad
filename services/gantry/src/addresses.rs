//! Where the services of a cluster are: one address for all, or one for each.

use rpc::client;

/// Where each service is: addresses of its replicas, with commas between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) scheduler: String,
    pub(crate) artifacts: String,
    pub(crate) streamer: String,
    /// Where calls to containers and volumes go, instead of to the gateway that attends the worker. `None`: there.
    pub(crate) door: Option<String>,
}

impl Addresses {
    /// All services at one address.
    pub(crate) fn one(address: &str) -> Self {
        let all = || address.to_owned();
        Self { scheduler: all(), artifacts: all(), streamer: all(), door: None }
    }

    /// Whether all services are at one address, and which.
    pub(crate) fn in_one_place(&self) -> Option<&str> {
        let one = self.scheduler == self.artifacts && self.artifacts == self.streamer && self.door.is_none();
        one.then_some(self.scheduler.as_str())
    }

    /// Parses `ADDRESS` or `scheduler=ADDRESS,artifacts=ADDRESS,streamer=ADDRESS,door=ADDRESS`. An address without a name belongs to the
    /// name before it, as another replica; those before any name are the default of the services that are not named.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        const NAMES: [&str; 4] = ["scheduler", "artifacts", "streamer", "door"];
        let mut default = Vec::new();
        let mut named: [Vec<&str>; 4] = Default::default();
        let mut present = None;
        for item in text.split(',').map(str::trim) {
            let address = match item.split_once('=').filter(|(name, _)| !name.contains(':')) {
                Some((name, address)) => {
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
            client::addresses(address).map_err(|error| {
                meant(address).map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"))
            })?;
            present.map_or(&mut default, |at| &mut named[at]).push(address);
        }
        let [scheduler, artifacts, streamer, door] = named.map(|addresses| addresses.join(","));
        let default = default.join(",");
        let or_default = |address: String, name: &str| match (address.as_str(), default.as_str()) {
            ("", "") => {
                Err(format!("where is the {name}? write {name}=ADDRESS, or an address for all in front"))
            }
            ("", default) => Ok(default.to_owned()),
            _ => Ok(address),
        };
        Ok(Self {
            scheduler: or_default(scheduler, "scheduler")?,
            artifacts: or_default(artifacts, "artifacts")?,
            streamer: or_default(streamer, "streamer")?,
            door: Some(door).filter(|door| !door.is_empty()),
        })
    }
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
        let Addresses { scheduler, artifacts, streamer, door } = Addresses::parse(text).expect(text);
        [scheduler, artifacts, streamer, door.unwrap_or_default()]
    }

    #[test]
    fn one_address_or_one_for_each() {
        assert_eq!(parsed("http://a:1"), ["http://a:1", "http://a:1", "http://a:1", ""]);
        assert_eq!(Addresses::parse("unix:///x").expect("parsed").in_one_place(), Some("unix:///x"));
        assert_eq!(
            parsed("scheduler=http://s:1,artifacts=http://a:1,streamer=http://t:1,door=http://d:1"),
            ["http://s:1", "http://a:1", "http://t:1", "http://d:1"]
        );
        assert_eq!(
            parsed("http://a:1,streamer=http://t:1,http://t:2"),
            ["http://a:1", "http://a:1", "http://t:1,http://t:2", ""]
        );
        assert_eq!(parsed("http://a:1, http://b:1")[0], "http://a:1,http://b:1");
        assert_eq!(Addresses::parse("http://a:1,door=http://d:1").expect("parsed").in_one_place(), None);
    }

    #[test]
    fn what_is_missing_or_unknown_is_said() {
        let refused = |text: &str| Addresses::parse(text).expect_err(text);
        assert!(refused("scheduler=http://s:1").contains("artifacts=ADDRESS"));
        assert!(refused("shceduler=http://s:1").contains("\"shceduler\" is none of scheduler"));
        assert!(refused("door=http://a:1,door=http://b:1,http://c").contains("twice"));
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
