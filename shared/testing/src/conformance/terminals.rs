//! Conformance tests of terminals.

use std::sync::Arc;

use bytes::Bytes;
use domain::ProcessId;
use domain::workload::Stdin;
use runtime::{Attachment, Offsets, ProcessSpec, Runtime, TerminalSize};

use super::{RuntimeExt, Subject, claims, exited, on_root, process, programs, read_until};

/// Starts a process in a terminal, attaches to it, and waits until it has printed the size.
async fn in_a_terminal(subject: &impl Subject, runtime: &Arc<dyn Runtime>) -> (ProcessId, Attachment) {
    let handle = runtime.made(on_root(subject).await).await;
    let terminal = Some(TerminalSize { columns: 91, rows: 37 });
    let spec = ProcessSpec { stdin: Stdin::Attached, terminal, ..process(&programs::window()) };
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "37 91").await;
    (id, attachment)
}

/// Changes the size, waits until the process has printed it, and ends the process.
async fn resize_and_end(runtime: &Arc<dyn Runtime>, id: ProcessId, mut attachment: Attachment) {
    let typed = attachment.stdin_offset;
    attachment.input.resize(TerminalSize { columns: 120, rows: 50 }).await.expect("resize");
    attachment.input.stdin(typed, Bytes::from_static(b"again\n")).await.expect("type");
    read_until(&mut attachment.events, "50 120").await;
    attachment.input.stdin(typed + 6, Bytes::from_static(b"end\n")).await.expect("type");
    assert_eq!(runtime.ended(id).await, exited(5));
}

/// A process sees the initial and the changed size of its terminal, and receives typed input.
pub async fn terminal_size_can_change(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "terminal") {
        return;
    }
    let (id, attachment) = in_a_terminal(&subject, &runtime).await;
    resize_and_end(&runtime, id, attachment).await;
}

/// A terminal stays open when its runtime is replaced. Input through the new runtime reaches the
/// process.
pub async fn terminal_survives_its_runtime(mut subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "terminal") {
        return;
    }
    let (id, attachment) = in_a_terminal(&subject, &runtime).await;
    drop((attachment, runtime));
    subject.reopen().await;

    let runtime = subject.runtime();
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    resize_and_end(&runtime, id, attachment).await;
}
