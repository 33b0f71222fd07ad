//! Conformance tests of output and input.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use domain::workload::{FailureReason, InlineStdin, OutputMode, Stdin};
use futures::StreamExt;
use runtime::{Ended, Offsets, ProcessEvent, ProcessSpec, ProcessState, RuntimeError};

use super::{
    RuntimeExt, Subject, claims, exited, has, in_time, is_signal, on_root, process, programs, read_all,
    read_until,
};

/// Each reader can read both outputs completely, from any offset, also after the end.
pub async fn output_is_readable_from_any_offset(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "complete-output") {
        return;
    }
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, process(&programs::say("0123456789", "abcdef"))).await;
    let said = runtime.read_output(id).await;
    assert_eq!((said.stdout.as_slice(), said.stderr.as_slice()), (&b"0123456789"[..], &b"abcdef"[..]));
    assert_eq!(said.ended, Some(exited(0)));

    let from = Offsets { stdout: 7, stderr: 6 };
    let attachment = runtime.attach(id, from).await.expect("attach");
    let said = in_time("the rest", read_all(attachment)).await;
    assert_eq!((said.stdout.as_slice(), said.stderr.as_slice()), (&b"789"[..], &b""[..]));
    for from in [Offsets { stdout: 11, stderr: 0 }, Offsets { stdout: 0, stderr: 7 }] {
        let refused = runtime.attach(id, from).await;
        assert!(matches!(refused, Err(RuntimeError::OffsetOutOfRange { .. })), "{from:?}");
    }
    let at = |since| runtime.offsets_at(id, since);
    assert_eq!(at(SystemTime::UNIX_EPOCH).await.expect("offsets"), Offsets::default());
    let later = SystemTime::now() + Duration::from_secs(3600);
    assert_eq!(at(later).await.expect("offsets"), Offsets { stdout: 10, stderr: 6 });
}

/// A process whose output is not acknowledged is blocked, and no output is lost.
pub async fn unread_output_blocks_its_process(mut subject: impl Subject) {
    let total = 3 * subject.spool_bytes() + 4 * 1024 * 1024;
    let runtime = subject.runtime();
    if !claims(&*runtime, "held-output") {
        return;
    }
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, process(&programs::count(total))).await;
    // Read everything that is readable without an acknowledgement. Then reopen the runtime.
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    let mut read = 0;
    while let Ok(Some(event)) =
        tokio::time::timeout(Duration::from_millis(500), attachment.events.next()).await
    {
        let ProcessEvent::Output { data, .. } = event.expect("an event") else { panic!("the process ended") };
        read += data.len() as u64;
    }
    assert!(subject.spool_bytes() <= read && read < total, "{read} of {total}");
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started);
    drop(attachment);
    drop(runtime);
    subject.reopen().await;

    let said = subject.runtime().read_output(id).await;
    assert_eq!((said.gone, said.stdout.len() as u64), (0, total));
    let wrong = (0..).zip(&said.stdout).find(|(offset, byte)| programs::counted(*offset) != **byte);
    assert_eq!(wrong, None);
    assert_eq!(said.ended, Some(exited(0)));
}

/// Output beyond the spool is dropped from its beginning, and readers receive an event for the
/// loss.
pub async fn spooled_output_drops_its_beginning(subject: impl Subject) {
    let total = 3 * subject.spool_bytes() + 4 * 1024 * 1024;
    let runtime = subject.runtime();
    if !claims(&*runtime, "complete-output") {
        return;
    }
    let spec = ProcessSpec { output: OutputMode::Spooled, ..process(&programs::count(total)) };
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, spec).await;
    assert_eq!(runtime.ended(id).await, exited(0), "the process ends without a reader");
    let said = runtime.read_output(id).await;
    assert_eq!(said.gone + said.stdout.len() as u64, total);
    assert!(said.gone > 0 && said.stdout.len() as u64 >= subject.spool_bytes());
    let wrong = (said.gone..).zip(&said.stdout).find(|(offset, byte)| programs::counted(*offset) != **byte);
    assert_eq!(wrong, None);
}

/// A blocked process continues after a detach.
pub async fn process_continues_after_detach(subject: impl Subject) {
    let total = 3 * subject.spool_bytes() + 4 * 1024 * 1024;
    let runtime = subject.runtime();
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, process(&programs::count(total))).await;
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    attachment.input.detach().await.expect("detach");
    assert_eq!(runtime.ended(id).await, exited(0));
}

/// Dropping a reader or a wait changes nothing.
pub async fn dropped_readers_and_waiters_change_nothing(subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, process(&programs::ignore_term())).await;
    for _ in 0..20 {
        let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
        read_until(&mut attachment.events, "ready").await;
        let wait = tokio::time::timeout(Duration::from_millis(2), runtime.wait(id)).await;
        assert!(wait.is_err(), "{wait:?}");
    }
    runtime.stop(id, Duration::ZERO).await.expect("stop");
    let ended = runtime.ended(id).await;
    assert!(is_signal(&*runtime, &ended, 9, true), "{ended:?}");
}

/// Repeated input arrives once and in order, and ends when it is closed.
pub async fn repeated_input_arrives_once(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(on_root(&subject).await).await;
    let spec = ProcessSpec { stdin: Stdin::Attached, ..process(&programs::cat()) };
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    assert_eq!(attachment.stdin_offset, 0);
    let input = &attachment.input;
    input.stdin(0, Bytes::from_static(b"one ")).await.expect("input");
    input.stdin(0, Bytes::from_static(b"one two ")).await.expect("input");
    let gap = input.stdin(100, Bytes::from_static(b"x")).await;
    assert!(matches!(gap, Err(RuntimeError::OffsetOutOfRange { offset: 100, limit: 8 })), "{gap:?}");
    read_until(&mut attachment.events, "one two ").await;
    if !claims(&*runtime, "durable-input") {
        // Without `durable-input`, one runtime sends all input.
        attachment.input.stdin(4, Bytes::from_static(b"two three")).await.expect("input");
        attachment.input.close_stdin().await.expect("close");
        assert_eq!(runtime.ended(id).await, exited(0));
        return;
    }
    drop(attachment);
    drop(runtime);
    subject.reopen().await;

    let runtime = subject.runtime();
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    assert_eq!(attachment.stdin_offset, 8);
    attachment.input.stdin(4, Bytes::from_static(b"two three")).await.expect("input");
    attachment.input.close_stdin().await.expect("close");
    let said = in_time("the end", read_all(attachment)).await;
    assert_eq!((said.text(), said.ended.as_ref()), ("one two three", Some(&exited(0))));
}

/// Binary input arrives unchanged, or is rejected. After a rejection nothing of it has arrived, and
/// later input arrives.
pub async fn binary_input_arrives_or_is_rejected(subject: impl Subject) {
    let runtime = subject.runtime();
    let spec = ProcessSpec { stdin: Stdin::Attached, ..process(&programs::cat()) };
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    attachment.input.stdin(0, Bytes::from_static(b"text")).await.expect("input");
    read_until(&mut attachment.events, "text").await;
    let every: Vec<u8> = (0..=255).collect();
    let said = attachment.input.stdin(4, Bytes::from(every.clone())).await;
    let (taken, after) = if claims(&*runtime, "binary-input") {
        said.expect("input");
        (every, 260)
    } else {
        assert!(matches!(said, Err(RuntimeError::Unsupported(_))), "{said:?}");
        (Vec::new(), 4)
    };
    attachment.input.stdin(after, Bytes::from_static(b" more")).await.expect("input");
    read_until(&mut attachment.events, " more").await;
    attachment.input.close_stdin().await.expect("close");
    assert_eq!(runtime.ended(id).await, exited(0));
    if has(&*runtime, "complete-output") {
        assert_eq!(runtime.read_output(id).await.stdout, [b"text", &taken[..], b" more"].concat());
    }
}

/// A process reads its inline input, and nothing else. Binary input is rejected without
/// `binary-input`.
pub async fn inline_input_is_read_to_its_end(subject: impl Subject) {
    let runtime = subject.runtime();
    let inline = |input: Vec<u8>| ProcessSpec {
        stdin: Stdin::Inline(InlineStdin(input)),
        ..process(&programs::cat())
    };
    for input in [vec![], b"one".to_vec(), vec![b'x'; 1 << 20]] {
        let handle = runtime.made(on_root(&subject).await).await;
        let id = runtime.started(handle, inline(input.clone())).await;
        let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
        // Input of attached clients is discarded.
        attachment.input.stdin(0, Bytes::from_static(b"other")).await.expect("input");
        attachment.input.close_stdin().await.expect("close");
        let said = in_time("the end", read_all(attachment)).await;
        assert_eq!(said.ended, Some(exited(0)));
        if has(&*runtime, "complete-output") {
            assert!(said.stdout == input, "{} bytes of {}", said.stdout.len(), input.len());
        }
    }
    let handle = runtime.made(on_root(&subject).await).await;
    let unread = ProcessSpec { command: process(&programs::exit(3)).command, ..inline(vec![b'x'; 1 << 20]) };
    let id = runtime.started(handle, unread).await;
    assert_eq!(runtime.ended(id).await, exited(3));

    let every: Vec<u8> = (0..=255).collect();
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, inline(every.clone())).await;
    let said = runtime.read_output(id).await;
    if claims(&*runtime, "binary-input") {
        assert_eq!((said.stdout, said.ended), (every, Some(exited(0))));
    } else {
        let rejected = matches!(&said.ended, Some(Ended::NotStarted(failure)) if failure.reason == FailureReason::Unsupported);
        assert!(rejected, "{:?}", said.ended);
    }
}

/// A process that does not read blocks its writer. Input for an ended process, or after the process
/// closed its input, is discarded.
pub async fn unread_input_blocks_its_writer(subject: impl Subject) {
    let runtime = subject.runtime();
    let much = Bytes::from(vec![b'x'; 4 << 20]);
    let spec = ProcessSpec { stdin: Stdin::Attached, ..process(&programs::sleep()) };
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, spec).await;
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    let waited =
        tokio::time::timeout(Duration::from_millis(300), attachment.input.stdin(0, much.clone())).await;
    assert!(waited.is_err(), "{waited:?}");
    runtime.stop(id, Duration::from_secs(10)).await.expect("stop");
    in_time("input for an ended process", attachment.input.stdin(0, much.clone())).await.expect("input");

    let spec = ProcessSpec { stdin: Stdin::Attached, ..process(&programs::close_input()) };
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    in_time("input for a process that closed its input", attachment.input.stdin(0, much))
        .await
        .expect("input");
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started);
    runtime.destroy_container(handle).await.expect("destroy");
}
