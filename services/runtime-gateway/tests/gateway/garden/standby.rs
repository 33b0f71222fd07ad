//! Successive gateways of one worker.

use domain::workload::Exit;
use futures::StreamExt;
use runtime::{Ended, Offsets, ProcessEvent, Runtime, RuntimeError};
use testing::conformance::{RuntimeExt, in_time, process, put, read_all, read_until};
use testing::garden::Manner;

use super::faults::Bench;

/// Prints a line each time that a file appears, and exits with 7.
const SCRIPT: &str = "echo one; until [ -s /out/two ]; do sleep 0.01; done; \
                      echo two; until [ -s /out/three ]; do sleep 0.01; done; echo three; exit 7";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_gateway_discards_process_state() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(bench) = Bench::new(manner).await else { return };
        let first = &bench.runtime;
        let handle = first.made(bench.spec.clone()).await;
        let id = first.started(handle, process(&["/bin/sh", "-c", SCRIPT].map(str::to_owned))).await;
        let mut attachment = first.attach(id, Offsets::default()).await.expect("attach");
        read_until(&mut attachment.events, "one").await;
        let mut waiting = Box::pin(first.wait(id));
        assert!(futures::poll!(&mut waiting).is_pending());

        let second = bench.subject.another(|config| config).await.expect("another gateway");
        let mut there = second.attach(id, Offsets::default()).await.expect("attach");
        first.taken_over().await;
        let waited = in_time("an answer", waiting).await;
        assert!(matches!(waited, Err(RuntimeError::TakenOver(_))), "{manner:?}: {waited:?}");
        let refused = in_time("an end of the events", async {
            loop {
                match attachment.events.next().await.expect("more to come") {
                    Err(error) => break error,
                    Ok(ProcessEvent::Ended(ended)) => panic!("{manner:?}: {ended:?}"),
                    Ok(_) => {}
                }
            }
        })
        .await;
        assert!(matches!(refused, RuntimeError::TakenOver(_)), "{manner:?}: {refused:?}");
        put(&**first, bench.volume, "two", "x").await;
        let mut at = 0;
        in_time("the output for the second gateway", async {
            loop {
                if let ProcessEvent::Output { offset, data, .. } =
                    there.events.next().await.expect("more to come").expect("an event")
                {
                    assert_eq!(&data[..], b"two\n", "{manner:?}");
                    at = offset + data.len() as u64;
                    break;
                }
            }
        })
        .await;
        drop((there, second));

        // The first gateway takes over again, and its caller continues at the offset of the second.
        let attachment = first.attach(id, Offsets { stdout: at, stderr: 0 }).await.expect("attach");
        put(&**first, bench.volume, "three", "x").await;
        let said = in_time("the rest", read_all(attachment)).await;
        assert_eq!((said.text(), said.gone), ("three\n", 0), "{manner:?}");
        assert_eq!(said.ended, Some(Ended::Exited { exit: Exit::Code(7), stopped: false }));
        assert_eq!(bench.runs(), 1);
    }
}
