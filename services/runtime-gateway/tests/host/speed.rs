//! How fast it is, for people: `cargo test --release -p runtime-gateway --test host -- --ignored --nocapture speed`.

use std::time::{Duration, Instant};

use domain::AttemptId;
use domain::ContainerHandle;
use domain::workload::OutputMode;
use futures::StreamExt;
use runtime::{Offsets, OutputStream, ProcessEvent, ProcessSpec, Runtime};
use testing::conformance::{container, process};

use super::subject::HostSubject;

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures, and decides nothing"]
async fn speed_of_a_container_that_does_nothing() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.host();
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..100 {
        let (handle, id) = (ContainerHandle::new(), AttemptId::new());
        let begin = Instant::now();
        runtime.create_container(handle, container()).await.expect("make");
        times[0].push(begin.elapsed());
        let begin = Instant::now();
        runtime.start(handle, id, process(&["true".to_owned()])).await.expect("start");
        times[1].push(begin.elapsed());
        runtime.wait(id).await.expect("wait");
        times[2].push(begin.elapsed());
        let begin = Instant::now();
        runtime.destroy_container(handle).await.expect("destroy");
        times[3].push(begin.elapsed());
    }
    let [create, start, exit, destroy] = times.map(|mut times| median(&mut times));
    eprintln!("create {create:?}, start {start:?}, start to exit {exit:?}, destroy {destroy:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures, and decides nothing"]
async fn speed_of_output() {
    const TOTAL: u64 = 4 << 30;
    let Some(subject) = HostSubject::with_spool(32 << 20) else { return };
    let runtime = subject.host();
    for (what, output, read) in [
        ("read and acknowledged", OutputMode::Attached, true),
        ("spooled and not read", OutputMode::Spooled, false),
    ] {
        let (handle, id) = (ContainerHandle::new(), AttemptId::new());
        runtime.create_container(handle, container()).await.expect("make");
        let command = ["dd", "if=/dev/zero", "bs=1M", &format!("count={}", TOTAL >> 20)].map(str::to_owned);
        let begin = Instant::now();
        runtime.start(handle, id, ProcessSpec { output, ..process(&command) }).await.expect("start");
        let mut said = 0;
        if read {
            let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
            while let Some(event) = attachment.events.next().await {
                if let ProcessEvent::Output { stream: OutputStream::Stdout, offset, data } =
                    event.expect("an event")
                {
                    said += data.len() as u64;
                    let up_to = Offsets { stdout: offset + data.len() as u64, stderr: 0 };
                    attachment.input.acknowledge(up_to).await.expect("acknowledge");
                }
            }
            assert_eq!(said, TOTAL);
        }
        runtime.wait(id).await.expect("wait");
        let seconds = begin.elapsed().as_secs_f64();
        eprintln!("{what}: {:.2} GB/s", TOTAL as f64 / seconds / 1e9);
        runtime.destroy_container(handle).await.expect("destroy");
    }
}
