//! Containers on a Garden worker: limits, network, many small writes, and concurrent destruction.

use concourse::garden::{Client, Settings};
use domain::workload::{Exit, Limits};
use runtime::{ContainerSpec, Ended, Runtime};
use testing::conformance::{RuntimeExt, process, programs};
use testing::garden::Manner;

use super::faults::Bench;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_reach_the_worker() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(bench) = Bench::new(manner).await else { return };
        let client = Client::new(bench.subject.server().address(), Settings::default());
        for (cpu_millis, shares) in [(Some(500), 512), (Some(1), 2), (None, 0)] {
            let limits = Limits { cpu_millis, memory_bytes: Some(1 << 30), ..Limits::default() };
            let handle = bench.runtime.made(ContainerSpec { limits, ..bench.spec.clone() }).await;
            let name = handle.to_string();
            let (cpu, memory) = tokio::join!(client.cpu_limits(&name), client.memory_limits(&name));
            assert_eq!(cpu.expect("limits").limit_in_shares, shares, "{manner:?} {cpu_millis:?}");
            assert_eq!(memory.expect("limits").limit_in_bytes, 1 << 30, "{manner:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_have_network_access() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(bench) = Bench::new(manner).await else { return };
        let handle = bench.runtime.made(bench.spec.clone()).await;
        assert!(bench.subject.server().has_network(&handle.to_string()), "{manner:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_small_writes_are_not_lost() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    // More writes than the server buffers without a reader.
    let script = "i=0; while [ $i -lt 6000 ]; do echo $i; i=$((i+1)); done; exit 7";
    let handle = bench.runtime.made(bench.spec.clone()).await;
    let id = bench.runtime.started(handle, process(&["/bin/sh", "-c", script].map(str::to_owned))).await;
    bench.runtime.ended(id).await;
    let output = bench.runtime.read_output(id).await;
    assert_eq!((output.text().lines().count(), output.gone), (6000, 0));
    assert_eq!(output.ended, Some(Ended::Exited { exit: Exit::Code(7), stopped: false }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_destructions_of_container_both_succeed() {
    for manner in [Manner::Containerd, Manner::Guardian, Manner::Houdini] {
        let Some(bench) = Bench::new(manner).await else { return };
        let handle = bench.runtime.made(bench.spec.clone()).await;
        let id = bench.runtime.started(handle, process(&programs::ignore_term())).await;
        bench.runtime.process(id).await.expect("a state");
        let other = bench.subject.another(|config| config).await.expect("another gateway");
        // The second call fails at once while the first one continues.
        let (one, two) =
            tokio::join!(bench.runtime.destroy_container(handle), other.destroy_container(handle));
        one.unwrap_or_else(|error| panic!("{manner:?}: {error}"));
        two.unwrap_or_else(|error| panic!("{manner:?}: {error}"));
        assert!(bench.subject.server().handles().is_empty(), "{manner:?}");
    }
}
