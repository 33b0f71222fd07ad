//! Runs `/bin/true` once on a Concourse worker by bare calls, without services around them: what remains of `gantry run -- /bin/true` there.
//! For `make bench`.
//!
//! It does what any client of the two protocols has to: a copy-on-write volume of the image and a container in it, both with properties
//! by which they would be found again, the process, its output to the end, its exit, and both destroyed. It prints the milliseconds until
//! the end of the process was known.

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
        return Err("usage: bare_garden GARDEN BAGGAGECLAIM VOLUME, which has an image".into());
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
    // With all that it writes, which is nothing.
    let exit = containers.run(&name, &process).await?.wait().await?;
    if exit.status != 0 {
        return Err(format!("it ended with {}", exit.status).into());
    }
    let ended = begin.elapsed();
    containers.destroy(&name).await?;
    volumes.destroy(&root).await?;
    writeln!(std::io::stdout(), "{:.3}", ended.as_secs_f64() * 1e3)?;
    Ok(())
}
