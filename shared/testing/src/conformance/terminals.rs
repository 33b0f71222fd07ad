//! Terminals.

use std::sync::Arc;

use bytes::Bytes;
use domain::AttemptId;
use domain::workload::Stdin;
use runtime::{Attachment, Offsets, ProcessSpec, Runtime, Window};

use super::{RuntimeExt, Subject, claims, exited, on_root, process, programs, read_until};

/// A process in a terminal, attached to, that has said which size it found.
async fn in_a_terminal(subject: &impl Subject, runtime: &Arc<dyn Runtime>) -> (AttemptId, Attachment) {
    let handle = runtime.made(on_root(subject).await).await;
    let terminal = Some(Window { columns: 91, rows: 37 });
    let spec = ProcessSpec { stdin: Stdin::Attached, terminal, ..process(&programs::window()) };
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "37 91").await;
    (id, attachment)
}

/// Changes the size, and has the process say so and end.
async fn resize_and_end(runtime: &Arc<dyn Runtime>, id: AttemptId, mut attachment: Attachment) {
    let typed = attachment.stdin_offset;
    attachment.input.resize(Window { columns: 120, rows: 50 }).await.expect("resize");
    attachment.input.stdin(typed, Bytes::from_static(b"again\n")).await.expect("type");
    read_until(&mut attachment.events, "50 120").await;
    attachment.input.stdin(typed + 6, Bytes::from_static(b"end\n")).await.expect("type");
    assert_eq!(runtime.ended(id).await, exited(5));
}

/// A process finds the size that its terminal was given, and the one that it was changed to; what is typed reaches it.
pub async fn terminals_have_a_size_that_changes(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "terminal") {
        return;
    }
    let (id, attachment) = in_a_terminal(&subject, &runtime).await;
    resize_and_end(&runtime, id, attachment).await;
}

/// A terminal stays open when the runtime that its process was started by is gone: what is typed to the next one reaches it.
pub async fn terminals_outlive_the_runtime(mut subject: impl Subject) {
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
