//! Runs `/bin/true` on a Concourse worker by bare calls, without services around them: what remains of `gantry run -- /bin/true` there.
//! For `make bench`.
//!
//! It prints, for each run, the milliseconds until the end of the process is known, and until all of it is destroyed again.

use std::io::Write;
use std::time::Instant;

use concourse::baggageclaim::{self, Handle, Strategy, Timeouts, VolumeRequest};
use concourse::garden::{self, ContainerSpec, IpRange, NetOutRule, ProcessSpec, Settings};

type Error = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [garden, baggageclaim, image, runs] = &arguments[..] else {
        return Err("usage: bare_garden GARDEN BAGGAGECLAIM IMAGE RUNS".into());
    };
    let containers = garden::Client::new(garden, Settings::default());
    let volumes = baggageclaim::Client::new(baggageclaim, Timeouts::default());
    let parent = Handle::new(format!("bare-{}", std::process::id()))?;
    let import = Strategy::Import { path: image.clone(), follow_symlinks: false };
    volumes.create(&VolumeRequest::new(parent.clone(), import)).await?;
    for run in 0..runs.parse::<usize>()? {
        let begin = Instant::now();
        let name = format!("{parent}-{run}");
        let root = Handle::new(name.clone())?;
        let child = Strategy::Cow { volume: parent.clone() };
        let volume = volumes.create(&VolumeRequest::new(root.clone(), child)).await?;
        let everywhere = IpRange { start: "0.0.0.0".to_owned(), end: "255.255.255.255".to_owned() };
        let container = ContainerSpec {
            handle: name.clone(),
            rootfs: format!("raw://{}/rootfs", volume.path),
            netout_rules: vec![NetOutRule { networks: vec![everywhere], ..NetOutRule::default() }],
            ..ContainerSpec::default()
        };
        containers.create(&container).await?;
        let process =
            ProcessSpec { id: name.clone(), path: "/bin/true".to_owned(), ..ProcessSpec::default() };
        let exit = containers.run(&name, &process).await?.wait().await?;
        if exit.status != 0 {
            return Err(format!("it ended with {}", exit.status).into());
        }
        let ended = begin.elapsed();
        containers.destroy(&name).await?;
        volumes.destroy(&root).await?;
        let destroyed = begin.elapsed();
        let milliseconds = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        writeln!(std::io::stdout(), "{:.3} {:.3}", milliseconds(ended), milliseconds(destroyed))?;
    }
    volumes.destroy(&parent).await?;
    Ok(())
}
