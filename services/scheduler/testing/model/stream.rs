//! A stream of a gateway to a replica without a network. The replica serves
//! [`Workers::synchronize`].

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use domain::LeaseId;
use domain::worker::SessionClaims;
use futures::StreamExt;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::workers_server::Workers;
use rpc::{Reason, Refusal};
use tokio::sync::Notify;
use tonic::codec::{BufferSettings, DecodeBuf, Decoder, EncodeBody, EncodeBuf, Encoder};
use tonic::{Request, Status, Streaming};

use super::gateways::SentReport;
use crate::api::WorkersService;
use crate::app::App;
use crate::notify::desired_state::DesiredStates;
use crate::workloads::Phase;

/// Longest time that a replica may take for a reaction.
const PATIENCE: Duration = Duration::from_secs(30);

type Responses = <WorkersService as Workers>::SynchronizeStream;

/// Messages of a gateway. They are handed over without encoding, so that the end of processing is
/// known.
#[derive(Default)]
struct Mailbox {
    inner: Mutex<MailboxState>,
    all_processed: Notify,
}

#[derive(Default)]
struct MailboxState {
    messages: VecDeque<pb::SynchronizeRequest>,
    taken: VecDeque<pb::SynchronizeRequest>,
    /// Whether the replica asked for the next message when there was none.
    is_waited_for: bool,
    waker: Option<Waker>,
}

impl Mailbox {
    fn inner(&self) -> MutexGuard<'_, MailboxState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: pb::synchronize_request::Message) {
        let mut inner = self.inner();
        inner.messages.push_back(pb::SynchronizeRequest { message: Some(message) });
        inner.is_waited_for = false;
        let waker = inner.waker.take();
        drop(inner);
        waker.into_iter().for_each(Waker::wake);
    }

    fn poll(&self, context: &Context<'_>) -> Poll<Option<Result<(), Status>>> {
        let mut inner = self.inner();
        if let Some(message) = inner.messages.pop_front() {
            inner.taken.push_back(message);
            return Poll::Ready(Some(Ok(())));
        }
        inner.is_waited_for = true;
        inner.waker = Some(context.waker().clone());
        self.all_processed.notify_one();
        Poll::Pending
    }

    /// Resolves when all messages were processed.
    async fn all_processed(&self) {
        while !self.inner().is_waited_for {
            self.all_processed.notified().await;
        }
    }
}

/// Each message is one frame, so that the next one is polled only after the previous one was
/// processed.
struct Frames;

impl Encoder for Frames {
    type Item = ();
    type Error = Status;

    fn encode(&mut self, (): (), _: &mut EncodeBuf<'_>) -> Result<(), Status> {
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(64, 0)
    }
}

struct MailboxDecoder(Arc<Mailbox>);

impl Decoder for MailboxDecoder {
    type Item = pb::SynchronizeRequest;
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<pb::SynchronizeRequest>, Status> {
        let message = self.0.inner().taken.pop_front();
        message.map(Some).ok_or_else(|| Status::from(io::Error::from(io::ErrorKind::UnexpectedEof)))
    }
}

/// An open or ended stream.
pub(super) struct Stream {
    mailbox: Arc<Mailbox>,
    responses: Pin<Box<Responses>>,
    credential: String,
    /// `None`: not registered.
    pub(super) session: Option<SessionClaims>,
    /// The last received generation.
    newest: u64,
    /// Number of sent messages.
    number: u64,
}

/// Messages that the stream received.
#[derive(Debug, Clone, Default)]
pub(super) struct StreamOutput {
    pub(super) welcome: Option<pb::Welcome>,
    pub(super) desired: Vec<pb::Desired>,
    /// Reason why the stream has ended.
    pub(super) end: Option<&'static str>,
}

impl StreamOutput {
    fn take(&mut self, response: Option<Result<pb::SynchronizeResponse, Status>>) {
        match response {
            Some(Ok(response)) => match response.message.expect("a message") {
                pb::synchronize_response::Message::Welcome(welcome) => self.welcome = Some(welcome),
                pb::synchronize_response::Message::Desired(desired) => self.desired.push(desired),
            },
            Some(Err(status)) => {
                let last = self.desired.last().map(pb::Desired::directive);
                let is_forgotten = last == Some(pb::Directive::RegisterAgain);
                self.end = Some(if is_forgotten { "Forgotten" } else { name(status) });
            }
            None => self.end = Some("Ended"),
        }
    }
}

/// Returns the name of the session error.
fn name(status: Status) -> &'static str {
    let refusal = Refusal::from(status);
    let names = [
        (Reason::StaleSession, "Stale"),
        (Reason::AlreadyAttended, "AlreadyAttended"),
        (Reason::WorkerOfAnotherTeam, "OtherTeam"),
        (Reason::WorkerRetired, "Retired"),
        (Reason::Unavailable, "Leaving"),
    ];
    let name = names.iter().find(|(reason, _)| refusal.is(*reason)).map(|(_, name)| *name);
    name.unwrap_or_else(|| panic!("{refusal}"))
}

impl Stream {
    /// Opens a stream and registers.
    pub(super) async fn open(app: App, registration: pb::Registration) -> (Self, StreamOutput) {
        let signer = app.signer.clone();
        let mailbox = Arc::new(Mailbox::default());
        mailbox.send(pb::synchronize_request::Message::Registration(registration));
        let from = mailbox.clone();
        let messages = futures::stream::poll_fn(move |context| from.poll(context));
        let body = EncodeBody::new_client(Frames, messages, None, None);
        let inbound = Streaming::new_request(MailboxDecoder(mailbox.clone()), body, None, None);
        let responses = WorkersService(Arc::new(app)).synchronize(Request::new(inbound)).await;
        let responses = Box::pin(responses.expect("an open stream").into_inner());
        let (credential, session) = (String::new(), None);
        let mut stream = Self { mailbox, responses, credential, session, newest: 0, number: 0 };
        let mut output = StreamOutput::default();
        while output.end.is_none() && output.desired.is_empty() {
            stream.take(&mut output).await;
        }
        if let Some(welcome) = &output.welcome {
            stream.credential.clone_from(&welcome.session_credential);
            stream.session = Some(signer.verify(&stream.credential).expect("a signed credential"));
        }
        (stream, output)
    }

    async fn take(&mut self, output: &mut StreamOutput) {
        output.take(self.responses.next().await);
        self.newest = output.desired.last().map_or(self.newest, |desired| desired.generation);
    }

    /// Sends a report, and receives messages until it was processed.
    pub(super) async fn send_report(&mut self, report: &SentReport, output: &mut StreamOutput) {
        self.number += 1;
        let lease = |(id, phase): (&LeaseId, &Phase)| pb::ObservedLease {
            lease_id: id.to_string(),
            phase: match phase {
                Phase::Preparing => pb::LeasePhase::Preparing,
                Phase::Running => pb::LeasePhase::Running,
                Phase::Publishing => pb::LeasePhase::Publishing,
                Phase::Ended => pb::LeasePhase::Ended,
            }
            .into(),
            inputs: vec![],
        };
        let observed = pb::Observed {
            session_credential: self.credential.clone(),
            applied_generation: report.echo,
            leases: report.phases.iter().map(lease).collect(),
            number: self.number,
            ..pb::Observed::default()
        };
        self.mailbox.send(pb::synchronize_request::Message::Observed(observed));
        let mailbox = self.mailbox.clone();
        let all_processed = mailbox.all_processed();
        tokio::pin!(all_processed);
        while output.end.is_none() {
            tokio::select! {
                biased;
                () = self.take(output) => {}
                () = &mut all_processed => break,
            }
        }
    }

    /// Receives messages until the gateway knows the newest generation of the replica.
    pub(super) async fn receive(&mut self, output: &mut StreamOutput, states: &DesiredStates) {
        let session = self.session.clone().expect("a registered gateway");
        let known = states.subscribe(session.worker).news().map(|news| news.known);
        let generation = match known {
            None => 0,
            Some(known) if known.is_spoken_for_by(&session) => known.generation.unsigned_abs(),
            // Only the end of the stream follows.
            Some(_) => u64::MAX,
        };
        let receives = async {
            while output.end.is_none() && self.newest < generation {
                self.take(output).await;
            }
        };
        let receives = tokio::time::timeout(PATIENCE, receives).await;
        receives.unwrap_or_else(|_| panic!("generation {generation} was not received after {output:?}"));
    }
}
