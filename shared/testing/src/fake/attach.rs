//! Attachments to a process of the fake worker: its events and its input.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream;
use runtime::{Attachment, Offsets, OutputStream, ProcessEvent, ProcessInput, RuntimeError, TerminalSize};

use super::FakeWorker;
use super::process::{Inner, Process};

/// Largest size of one output event, in bytes.
const CHUNK: usize = 1 << 20;

/// Attaches to a process at these offsets.
pub(super) fn attach(
    worker: &Arc<FakeWorker>,
    process: &Arc<Process>,
    from: Offsets,
) -> Result<Attachment, RuntimeError> {
    let at = [from.stdout, from.stderr];
    let (stdin_offset, [stdout_offset, stderr_offset]) = {
        let inner = process.lock();
        for (output, offset) in inner.outputs.iter().zip(at) {
            if offset > output.head {
                return Err(RuntimeError::OffsetOutOfRange { offset, limit: output.head });
            }
        }
        (inner.stdin_taken(), [0, 1].map(|output: usize| inner.outputs[output].head))
    };
    let cursor = EventCursor { at, reported_stdin: stdin_offset, next_output: 0, phase: EventPhase::Output };
    let reader = Reader { worker: worker.clone(), process: process.clone(), cursor };
    let events = stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        match reader.next().await {
            Ok(Some(event)) => Some((Ok(event), Some(reader))),
            Ok(None) => None,
            Err(error) => Some((Err(error), None)),
        }
    });
    let input = Input { worker: worker.clone(), process: process.clone() };
    Ok(Attachment {
        stdin_offset,
        stdout_offset,
        stderr_offset,
        has_terminal: false,
        events: Box::pin(events),
        input: Arc::new(input),
    })
}

struct Reader {
    worker: Arc<FakeWorker>,
    process: Arc<Process>,
    cursor: EventCursor,
}

impl Reader {
    async fn next(&mut self) -> Result<Option<ProcessEvent>, RuntimeError> {
        tokio::select! {
            biased;
            error = self.worker.faults.unreachable() => Err(error),
            event = self.process.wait(|inner| self.cursor.next(inner)) => Ok(event),
        }
    }
}

/// Progress of one reader through the events of a process.
struct EventCursor {
    /// The reader's offset in each output.
    at: [u64; 2],
    reported_stdin: u64,
    /// Index of the output to read first. It alternates, so that neither output starves.
    next_output: usize,
    phase: EventPhase,
}

#[derive(PartialEq, Eq)]
enum EventPhase {
    Output,
    Ended,
    Done,
}

impl EventCursor {
    /// Returns the next event. `None`: there is none yet. `Some(None)`: the events are complete.
    fn next(&mut self, inner: &Inner) -> Option<Option<ProcessEvent>> {
        let taken = inner.stdin_taken();
        if self.phase == EventPhase::Output && self.reported_stdin != taken {
            self.reported_stdin = taken;
            return Some(Some(ProcessEvent::StdinAccepted(taken)));
        }
        if let Some(event) = self.output(inner) {
            return Some(Some(event));
        }
        let ended = inner.ended()?;
        let [stdout, stderr] = self.at;
        let (phase, event) = match self.phase {
            EventPhase::Output => (EventPhase::Ended, Some(ProcessEvent::Ended(ended))),
            EventPhase::Ended => (EventPhase::Done, Some(ProcessEvent::Done(Offsets { stdout, stderr }))),
            EventPhase::Done => (EventPhase::Done, None),
        };
        self.phase = phase;
        Some(event)
    }

    fn output(&mut self, inner: &Inner) -> Option<ProcessEvent> {
        for which in [self.next_output, 1 - self.next_output] {
            let (output, offset) = (&inner.outputs[which], self.at[which]);
            let stream = [OutputStream::Stdout, OutputStream::Stderr][which];
            if offset < output.tail() {
                self.at[which] = output.tail();
                return Some(ProcessEvent::Truncated { stream, from: offset, to: output.tail() });
            }
            if offset < output.head {
                let data = Bytes::from(output.from(offset, CHUNK));
                self.at[which] += data.len() as u64;
                self.next_output = 1 - which;
                return Some(ProcessEvent::Output { stream, offset, data });
            }
        }
        None
    }
}

struct Input {
    worker: Arc<FakeWorker>,
    process: Arc<Process>,
}

#[async_trait]
impl ProcessInput for Input {
    async fn stdin(&self, offset: u64, data: Bytes) -> Result<(), RuntimeError> {
        tokio::select! {
            biased;
            error = self.worker.faults.unreachable() => Err(error),
            sent = self.process.send(offset, &data) => sent,
        }
    }

    async fn close_stdin(&self) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.process.close_stdin().await;
        Ok(())
    }

    async fn signal(&self, number: u8) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.process.signal(number);
        Ok(())
    }

    async fn resize(&self, window: TerminalSize) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.process.resize(window)
    }

    async fn acknowledge(&self, up_to: Offsets) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.process.acknowledge([up_to.stdout, up_to.stderr]);
        Ok(())
    }

    async fn detach(&self) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.process.detach();
        Ok(())
    }
}
