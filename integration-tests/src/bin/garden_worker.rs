//! Fake Concourse workers for `make bench` and `make compose-test`:
//! `garden_worker [--listen ADDRESS] NAME…`.
//!
//! The process serves on the loopback or at another address of this machine until its standard
//! input ends. It first prints one line of JSON with the registrations of the workers: one for each
//! NAME, with that name as its tag. For each line of its input, it prints one line of JSON with the
//! requests so far.

use std::io::{BufRead, Error, ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr};

use testing::baggageclaim::{self, Driver};
use testing::garden::{self, Manner};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let mut names = std::env::args().skip(1).peekable();
    let mut address = IpAddr::from(Ipv4Addr::LOCALHOST);
    if names.next_if(|word| word == "--listen").is_some() {
        let wrong = || Error::new(ErrorKind::InvalidInput, "--listen needs an IP address");
        address = names.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
    }
    let mut workers = Vec::new();
    for name in names {
        let containers = garden::Server::start_at(address, Manner::Containerd);
        workers.push((name, containers, baggageclaim::Server::start_at(address, Driver::Overlay).await));
    }
    let registered = workers.iter().map(|(name, containers, volumes)| {
        serde_json::json!({
            "name": name, "addr": containers.address(), "baggageclaim_url": format!("http://{}", volumes.address()),
            "platform": "linux", "tags": [name], "team": "", "resource_types": null, "start_time": 1,
        })
    });
    let mut answers = std::io::stdout();
    writeln!(answers, "{}", serde_json::Value::from_iter(registered))?;
    tokio::task::spawn_blocking(move || {
        for line in std::io::stdin().lock().lines() {
            line?;
            let requests = workers.iter().flat_map(|(_, containers, volumes)| {
                let containers = containers.requests().into_iter().map(|request| format!("garden {request}"));
                let volumes = volumes.requests().into_iter().map(|request| format!("baggageclaim {request}"));
                containers.chain(volumes)
            });
            writeln!(answers, "{}", serde_json::Value::from_iter(requests))?;
        }
        Ok(())
    })
    .await?
}
