//! Attachments to processes of the host runtime: output, end and input.

use std::sync::Arc;

use async_trait::async_trait;
use domain::ProcessId;
use futures::stream;
use runtime::{
    Attachment, Ended, Offsets, OutputStream, ProcessEvent, ProcessInput, RuntimeError, TerminalSize,
};

use super::{PAUSE, Process, ended};
use crate::runtimes::host::filesystem::at;
use crate::runtimes::host::supervisor_protocol::{Answer, Connection, MAX_STDIN, Phase, Progress, Request};
use crate::runtimes::host::{Host, paths};
use crate::runtimes::output_spool::{ReadResult, Reader};
use crate::util::blocking::blocking;

impl Host {
    pub(in crate::runtimes::host) async fn attach(
        self: &Arc<Self>,
        id: ProcessId,
        from: Offsets,
    ) -> Result<Attachment, RuntimeError> {
        let process = self.find(id)?;
        let opened = process.clone();
        let (spools, has_terminal) = blocking(move || {
            let intent = match Self::intent(&opened)? {
                Some(intent) => Some(intent),
                None => Self::taken_intent(&opened)?,
            };
            let open = |name| {
                let path = opened.file(name);
                Reader::open(&path).map(Arc::new).map_err(at("open", &path))
            };
            let has_terminal = intent.is_some_and(|intent| intent.terminal.is_some());
            Ok(([open(paths::STDOUT)?, open(paths::STDERR)?], has_terminal))
        })
        .await?;
        for (spool, offset) in spools.iter().zip([from.stdout, from.stderr]) {
            let head = spool.marks().map_err(|error| RuntimeError::io("read a spool", error))?.head;
            if offset > head {
                return Err(RuntimeError::OffsetOutOfRange { offset, limit: head });
            }
        }
        let mut events = Events::new(Arc::clone(self), process.clone(), spools, from);
        events.update_progress().await?;
        let Progress { stdin_taken: stdin_offset, stdout: stdout_offset, stderr: stderr_offset, .. } =
            events.seen;
        events.reported_stdin = stdin_offset;
        let events = stream::unfold(Some(events), |events| async move {
            let mut events = events?;
            match events.next().await {
                Ok(Some(event)) => Some((Ok(event), Some(events))),
                Ok(None) => None,
                Err(error) => Some((Err(error), None)),
            }
        });
        let input = Input {
            host: Arc::clone(self),
            process,
            has_terminal,
            connection: tokio::sync::Mutex::default(),
        };
        Ok(Attachment {
            stdin_offset,
            stdout_offset,
            stderr_offset,
            has_terminal,
            events: Box::pin(events),
            input: Arc::new(input),
        })
    }
}

/// Event stream of a reader.
struct Events {
    host: Arc<Host>,
    process: Process,
    spools: [Arc<Reader>; 2],
    /// Offset of the reader in each output.
    at: [u64; 2],
    /// The last known progress of the process.
    seen: Progress,
    reported_stdin: u64,
    connection: Option<Connection>,
    /// Index of the output to read first. It alternates, so that neither output starves.
    next_output: usize,
    ended: Option<Ended>,
    phase: EventPhase,
}

#[derive(PartialEq, Eq)]
enum EventPhase {
    Output,
    Ended,
    Done,
}

impl Events {
    fn new(host: Arc<Host>, process: Process, spools: [Arc<Reader>; 2], from: Offsets) -> Self {
        Self {
            host,
            process,
            spools,
            at: [from.stdout, from.stderr],
            seen: Progress::default(),
            reported_stdin: 0,
            connection: None,
            next_output: 0,
            ended: None,
            phase: EventPhase::Output,
        }
    }

    async fn next(&mut self) -> Result<Option<ProcessEvent>, RuntimeError> {
        loop {
            if self.phase == EventPhase::Done {
                return Ok(None);
            }
            if self.seen.stdin_taken != self.reported_stdin {
                self.reported_stdin = self.seen.stdin_taken;
                return Ok(Some(ProcessEvent::StdinAccepted(self.reported_stdin)));
            }
            if let Some(event) = self.output().await? {
                return Ok(Some(event));
            }
            match &self.ended {
                Some(ended) if self.phase == EventPhase::Output => {
                    self.phase = EventPhase::Ended;
                    return Ok(Some(ProcessEvent::Ended(ended.clone())));
                }
                Some(_) => {
                    self.phase = EventPhase::Done;
                    let [stdout, stderr] = self.at;
                    return Ok(Some(ProcessEvent::Done(Offsets { stdout, stderr })));
                }
                None => self.wait_for_change().await?,
            }
        }
    }

    /// Returns the next part of the output.
    async fn output(&mut self) -> Result<Option<ProcessEvent>, RuntimeError> {
        for which in [self.next_output, 1 - self.next_output] {
            let heads = [self.seen.stdout, self.seen.stderr];
            let offset = self.at[which];
            if offset >= heads[which] {
                continue;
            }
            let spool = Arc::clone(&self.spools[which]);
            let read = move || spool.read(offset).map_err(|error| RuntimeError::io("read a spool", error));
            let found = blocking(read).await?;
            self.next_output = 1 - which;
            let stream = [OutputStream::Stdout, OutputStream::Stderr][which];
            match found {
                ReadResult::Data(data) => {
                    self.at[which] += data.len() as u64;
                    return Ok(Some(ProcessEvent::Output { stream, offset, data }));
                }
                ReadResult::Lost(to) => {
                    self.at[which] = to;
                    return Ok(Some(ProcessEvent::Truncated { stream, from: offset, to }));
                }
                ReadResult::Nothing => {
                    return Err(RuntimeError::Other(
                        "the spool has fewer bytes than its supervisor reports".to_owned(),
                    ));
                }
            }
        }
        Ok(None)
    }

    /// Waits until the progress changes.
    async fn wait_for_change(&mut self) -> Result<(), RuntimeError> {
        let Some(connection) = &mut self.connection else { return self.update_progress().await };
        match connection.progress(&Request::Watch(self.seen)).await {
            Ok(seen) if seen.phase != Phase::Ended => self.seen = seen,
            _ => self.connection = None,
        }
        Ok(())
    }

    /// Updates the progress, from the supervisor while there is one.
    async fn update_progress(&mut self) -> Result<(), RuntimeError> {
        loop {
            if let Some(ended) = ended(self.host.status_of(&self.process).await?) {
                for (spool, head) in self.spools.iter().zip([&mut self.seen.stdout, &mut self.seen.stderr]) {
                    *head = spool.marks().map_err(|error| RuntimeError::io("read a spool", error))?.head;
                }
                self.ended = Some(ended);
                return Ok(());
            }
            if let Ok(mut connection) = self.host.sockets.connect(&self.process.id.to_string()).await
                && let Ok(seen) = connection.progress(&Request::GetProgress).await
                && seen.phase != Phase::Ended
            {
                self.seen = seen;
                self.connection = Some(connection);
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The input side of an attachment.
struct Input {
    host: Arc<Host>,
    process: Process,
    has_terminal: bool,
    /// Taken out during a request, so that the connection of a cancelled request is not used again.
    connection: tokio::sync::Mutex<Option<Connection>>,
}

impl Input {
    /// Sends a request to the supervisor. `None`: the process has ended.
    async fn send_request(&self, request: &Request) -> Result<Option<Answer>, RuntimeError> {
        let mut kept = self.connection.lock().await;
        if let Some(mut connection) = kept.take()
            && let Ok(answer) = connection.request(request).await
        {
            *kept = Some(connection);
            return Ok(Some(answer));
        }
        loop {
            if let Ok(mut connection) = self.host.sockets.connect(&self.process.id.to_string()).await
                && let Ok(answer) = connection.request(request).await
            {
                *kept = Some(connection);
                return Ok(Some(answer));
            }
            if ended(self.host.status_of(&self.process).await?).is_some() {
                return Ok(None);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

#[async_trait]
impl ProcessInput for Input {
    async fn stdin(&self, offset: u64, data: bytes::Bytes) -> Result<(), RuntimeError> {
        let mut at = offset;
        let mut rest = data;
        loop {
            let part = rest.split_to(rest.len().min(MAX_STDIN));
            let length = part.len() as u64;
            let answer = self.send_request(&Request::Stdin { offset: at, data: part }).await?;
            if let Some(Answer::StdinGap(limit)) = answer {
                return Err(RuntimeError::OffsetOutOfRange { offset: at, limit });
            }
            at += length;
            if rest.is_empty() || answer.is_none() {
                return Ok(());
            }
        }
    }

    async fn close_stdin(&self) -> Result<(), RuntimeError> {
        self.send_request(&Request::CloseStdin).await.map(|_| ())
    }

    async fn signal(&self, number: u8) -> Result<(), RuntimeError> {
        self.send_request(&Request::Signal(number)).await.map(|_| ())
    }

    async fn acknowledge(&self, up_to: Offsets) -> Result<(), RuntimeError> {
        let Offsets { stdout, stderr } = up_to;
        self.send_request(&Request::Acknowledge { stdout, stderr }).await.map(|_| ())
    }

    async fn resize(&self, size: TerminalSize) -> Result<(), RuntimeError> {
        if !self.has_terminal {
            return Err(RuntimeError::Unsupported(format!("process {} has no terminal", self.process.id)));
        }
        self.send_request(&Request::Resize(size)).await.map(|_| ())
    }

    async fn detach(&self) -> Result<(), RuntimeError> {
        self.send_request(&Request::Detach).await.map(|_| ())
    }
}
