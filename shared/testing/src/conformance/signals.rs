//! Conformance tests of signals and stops.

use std::time::Duration;

use domain::workload::FailureReason;
use runtime::{ContainerSpec, Ended, Offsets, ProcessState, RuntimeError};

use super::{
    RuntimeExt, Subject, claims, exited, in_time, is_signal, lines, mount, on_root, process, programs, put,
    read_until,
};

/// A program without a handler for TERM ends on TERM, although it is the first process of its
/// container.
pub async fn plain_program_ends_on_term(subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, process(&programs::sleep())).await;
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    in_time("the start", async {
        while runtime.process(id).await.expect("a state") == ProcessState::Starting {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    attachment.input.signal(15).await.expect("signal");
    let ended = runtime.ended(id).await;
    assert!(is_signal(&*runtime, &ended, 15, false), "{ended:?}");

    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, process(&programs::sleep())).await;
    in_time("the start", async {
        while runtime.process(id).await.expect("a state") == ProcessState::Starting {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    runtime.stop(id, Duration::from_secs(1000)).await.expect("stop");
    let ended = runtime.ended(id).await;
    assert!(is_signal(&*runtime, &ended, 15, true), "{ended:?}");
    runtime.stop(id, Duration::ZERO).await.expect("stopping an ended process does nothing");
    assert_eq!(runtime.ended(id).await, ended);
}

/// A process that ignores TERM is killed after the grace period. A later call can shorten the
/// period but not lengthen it.
pub async fn process_is_killed_after_grace_period(subject: impl Subject) {
    let runtime = subject.runtime();
    for graces in [&[50][..], &[1_000_000, 50][..], &[50, 1_000_000][..], &[0][..]] {
        let handle = runtime.made(on_root(&subject).await).await;
        let id = runtime.started(handle, process(&programs::ignore_term())).await;
        let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
        read_until(&mut attachment.events, "ready").await;
        for grace in graces {
            runtime.stop(id, Duration::from_millis(*grace)).await.expect("stop");
        }
        let ended = runtime.ended(id).await;
        assert!(is_signal(&*runtime, &ended, 9, true), "{graces:?}: {ended:?}");
    }
}

/// Every signal reaches the process or is rejected. After a rejection the process continues, and no
/// output is lost.
pub async fn signals_arrive_or_are_rejected(subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, process(&programs::trap())).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    let signals = [(1, "HUP"), (2, "INT"), (10, "USR1")];
    if claims(&*runtime, "signals") {
        for (number, name) in signals {
            attachment.input.signal(number).await.expect("signal");
            read_until(&mut attachment.events, name).await;
        }
        assert_eq!(runtime.ended(id).await, exited(3));
        return;
    }
    for (number, name) in signals {
        let refused = attachment.input.signal(number).await;
        assert!(matches!(refused, Err(RuntimeError::Unsupported(_))), "{name}: {refused:?}");
    }
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started);
    runtime.stop(id, Duration::ZERO).await.expect("stop");
    let ended = runtime.ended(id).await;
    assert!(is_signal(&*runtime, &ended, 9, true), "{ended:?}");
    assert_eq!(runtime.read_output(id).await.text(), "ready\n");
}

/// The main process is asked to end with the stop signal of its container.
pub async fn stop_signal_asks_main_process_to_end(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "signals") {
        return;
    }
    let spec = ContainerSpec { stop_signal: Some(3), ..on_root(&subject).await };
    let handle = runtime.made(spec).await;
    let id = runtime.started(handle, process(&programs::sleep())).await;
    in_time("the start", async {
        while runtime.process(id).await.expect("a state") == ProcessState::Starting {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    runtime.stop(id, Duration::from_secs(600)).await.expect("stop");
    let ended = runtime.ended(id).await;
    assert!(is_signal(&*runtime, &ended, 3, true), "{ended:?}");
}

/// A stop before the start prevents the start. A stop after the start ends the process.
pub async fn stop_prevents_start_or_ends_process(subject: impl Subject) {
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    put(&*runtime, parent, "file", "line").await;
    for _ in 0..10 {
        let volume = runtime.child(parent).await;
        let mounts = vec![mount(volume, "/volume", false)];
        let handle = runtime.made(ContainerSpec { mounts, ..on_root(&subject).await }).await;
        let id = runtime.started(handle, process(&programs::sleep())).await;
        runtime.stop(id, Duration::from_millis(100)).await.expect("stop");
        assert_eq!(lines(&*runtime, volume, "file").await, 1, "the volume can be read at once");
        match runtime.ended(id).await {
            Ended::NotStarted(failure) => assert_eq!(failure.reason, FailureReason::StoppedBeforeStart),
            ended => assert!(matches!(ended, Ended::Exited { stopped: true, .. }), "{ended:?}"),
        }
        let output = runtime.read_output(id).await;
        assert_eq!(output.ended, Some(runtime.ended(id).await));
        runtime.destroy_container(handle).await.expect("destroy");
    }
}

/// A process ends when contact is lost, and continues while there is contact.
pub async fn process_ends_when_contact_is_lost(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "stop-after") {
        return;
    }
    let since_boot = || {
        let uptime = std::fs::read_to_string("/proc/uptime").expect("the time since the boot");
        Duration::from_secs_f64(
            uptime.split(' ').next().and_then(|text| text.parse().ok()).expect("a number"),
        )
    };
    let (first, second) =
        (runtime.made(on_root(&subject).await).await, runtime.made(on_root(&subject).await).await);
    let kept = runtime.started(first, process(&programs::ignore_term())).await;
    let mut attachment = runtime.attach(kept, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    runtime.contact(since_boot(), Duration::from_secs(600)).await.expect("contact");
    assert_eq!(runtime.process(kept).await.expect("a state"), ProcessState::Started);
    runtime.contact(since_boot(), Duration::from_millis(200)).await.expect("contact");
    assert!(matches!(runtime.ended(kept).await, Ended::Exited { stopped: true, .. }));
    let late = runtime.started(second, process(&programs::sleep())).await;
    let ended = runtime.ended(late).await;
    assert!(matches!(ended, Ended::Exited { stopped: true, .. }), "started out of contact: {ended:?}");
}
