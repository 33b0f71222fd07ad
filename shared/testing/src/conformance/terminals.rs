//! Terminals.

use bytes::Bytes;
use domain::workload::Stdin;
use runtime::{Offsets, ProcessSpec, Window};

use super::{RuntimeExt, Subject, claims, exited, on_root, process, programs, read_until};

/// A process finds the size that its terminal was given, and the one that it was changed to; what is typed reaches it.
pub async fn terminals_have_a_size_that_changes(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "terminal") {
        return;
    }
    let handle = runtime.made(on_root(&subject).await).await;
    let terminal = Some(Window { columns: 91, rows: 37 });
    let spec = ProcessSpec { stdin: Stdin::Attached, terminal, ..process(&programs::window()) };
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "37 91").await;

    attachment.input.resize(Window { columns: 120, rows: 50 }).await.expect("resize");
    attachment.input.stdin(0, Bytes::from_static(b"again\n")).await.expect("type");
    read_until(&mut attachment.events, "50 120").await;
    attachment.input.stdin(6, Bytes::from_static(b"end\n")).await.expect("type");
    assert_eq!(runtime.ended(id).await, exited(5));
}

/// A terminal stays open when the runtime that its process was started by is gone: what is typed to the next one reaches it.
pub async fn terminals_outlive_the_runtime(mut subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "terminal") {
        return;
    }
    let handle = runtime.made(on_root(&subject).await).await;
    let terminal = Some(Window { columns: 91, rows: 37 });
    let spec = ProcessSpec { stdin: Stdin::Attached, terminal, ..process(&programs::window()) };
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "37 91").await;
    drop((attachment, runtime));
    subject.reopen().await;

    let runtime = subject.runtime();
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    let typed = attachment.stdin_offset;
    attachment.input.resize(Window { columns: 120, rows: 50 }).await.expect("resize");
    attachment.input.stdin(typed, Bytes::from_static(b"again\n")).await.expect("type");
    read_until(&mut attachment.events, "50 120").await;
    attachment.input.stdin(typed + 6, Bytes::from_static(b"end\n")).await.expect("type");
    assert_eq!(runtime.ended(id).await, exited(5));
}
