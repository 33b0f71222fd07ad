//! Runs `/bin/true` once on a Concourse worker with direct calls, as the baseline of
//! `gantry run -- /bin/true` in `make bench`.
//!
//! It makes the calls that every client of the two protocols needs. It creates a copy-on-write
//! volume of the image and a container with properties. Then it runs the process, reads its output
//! and exit, and destroys both. It prints the milliseconds until the exit was known.

use std::io::Write;
use std::time::Instant;

use concourse::baggageclaim::{self, Handle, Strategy, Timeouts, VolumeRequest};
use concourse::garden::{self, ContainerSpec, IpRange, NetOutRule, ProcessSpec, Settings};

type Error = Box<dyn std::error::Error>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let begin = Instant::now();
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [garden, baggageclaim, image] = &arguments[..] else {
        return Err("usage: bare_garden GARDEN BAGGAGECLAIM VOLUME; VOLUME must contain an image".into());
    };
    let containers = garden::Client::new(garden, Settings::default());
    let volumes = baggageclaim::Client::new(baggageclaim, Timeouts::default());
    let name = format!("bare-{}", std::process::id());
    let whose = |kind: &str| [("bare.kind".to_owned(), kind.to_owned())].into();

    let root = Handle::new(name.clone())?;
    let child = Strategy::Cow { volume: Handle::new(image)? };
    let request = VolumeRequest { properties: whose("volume"), ..VolumeRequest::new(root.clone(), child) };
    let volume = volumes.create(&request).await?;
    let everywhere = IpRange { start: "0.0.0.0".to_owned(), end: "255.255.255.255".to_owned() };
    let container = ContainerSpec {
        handle: name.clone(),
        rootfs: format!("raw://{}/rootfs", volume.path),
        properties: whose("container"),
        netout_rules: vec![NetOutRule { networks: vec![everywhere], ..NetOutRule::default() }],
        ..ContainerSpec::default()
    };
    containers.create(&container).await?;
    let process = ProcessSpec { id: name.clone(), path: "/bin/true".to_owned(), ..ProcessSpec::default() };
    // Waits for the output, which is empty, and the exit.
    let exit = containers.run(&name, &process).await?.wait().await?;
    if exit.status != 0 {
        return Err(format!("the process ended with status {}", exit.status).into());
    }
    let ended = begin.elapsed();
    containers.destroy(&name).await?;
    volumes.destroy(&root).await?;
    writeln!(std::io::stdout(), "{:.3}", ended.as_secs_f64() * 1e3)?;
    Ok(())
}
