//! A stream of a gateway with a replica, without a network: what the replica is asked is [`Workers::synchronize`], as over one.

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

use super::gateways::Observed;
use crate::api::WorkersService;
use crate::app::App;
use crate::notify::desired_state::DesiredStates;
use crate::workloads::Phase;

/// How long a replica may take for what it does at once.
const PATIENCE: Duration = Duration::from_secs(30);

type Told = <WorkersService as Workers>::SynchronizeStream;

/// What a gateway has said. What is said is handed over as it is, so that it is known when all of it was heard.
#[derive(Default)]
struct Mailbox {
    inner: Mutex<Inner>,
    all_heard: Notify,
}

#[derive(Default)]
struct Inner {
    said: VecDeque<pb::SynchronizeRequest>,
    taken: VecDeque<pb::SynchronizeRequest>,
    /// Whoever hears looked for more when there was nothing.
    is_waited_for: bool,
    waker: Option<Waker>,
}

impl Mailbox {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, message: pb::synchronize_request::Message) {
        let mut inner = self.inner();
        inner.said.push_back(pb::SynchronizeRequest { message: Some(message) });
        inner.is_waited_for = false;
        let waker = inner.waker.take();
        drop(inner);
        waker.into_iter().for_each(Waker::wake);
    }

    fn poll(&self, context: &Context<'_>) -> Poll<Option<Result<(), Status>>> {
        let mut inner = self.inner();
        if let Some(message) = inner.said.pop_front() {
            inner.taken.push_back(message);
            return Poll::Ready(Some(Ok(())));
        }
        inner.is_waited_for = true;
        inner.waker = Some(context.waker().clone());
        self.all_heard.notify_one();
        Poll::Pending
    }

    /// Resolves when everything that was said was heard, and done.
    async fn all_heard(&self) {
        while !self.inner().is_waited_for {
            self.all_heard.notified().await;
        }
    }
}

/// Each message is one frame: only when that was done is the next one looked for.
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

struct Taken(Arc<Mailbox>);

impl Decoder for Taken {
    type Item = pb::SynchronizeRequest;
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<pb::SynchronizeRequest>, Status> {
        let message = self.0.inner().taken.pop_front();
        message.map(Some).ok_or_else(|| Status::from(io::Error::from(io::ErrorKind::UnexpectedEof)))
    }
}

/// A stream that is open, or was.
pub(super) struct Stream {
    mailbox: Arc<Mailbox>,
    told: Pin<Box<Told>>,
    credential: String,
    /// `None`: it was not let in.
    pub(super) session: Option<SessionClaims>,
    /// The generation that was told last.
    newest: u64,
    /// How many messages were said.
    number: u64,
}

/// What a stream told.
#[derive(Debug, Clone, Default)]
pub(super) struct Heartbeat {
    pub(super) welcome: Option<pb::Welcome>,
    pub(super) desired: Vec<pb::Desired>,
    /// Why it has ended.
    pub(super) end: Option<&'static str>,
}

impl Heartbeat {
    fn take(&mut self, told: Option<Result<pb::SynchronizeResponse, Status>>) {
        match told {
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

/// As the error of the session is called.
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
    /// Opens one and says hello.
    pub(super) async fn open(app: App, hello: pb::Hello) -> (Self, Heartbeat) {
        let signer = app.signer.clone();
        let mailbox = Arc::new(Mailbox::default());
        mailbox.say(pb::synchronize_request::Message::Hello(hello));
        let from = mailbox.clone();
        let said = futures::stream::poll_fn(move |context| from.poll(context));
        let body = EncodeBody::new_client(Frames, said, None, None);
        let inbound = Streaming::new_request(Taken(mailbox.clone()), body, None, None);
        let told = WorkersService(Arc::new(app)).synchronize(Request::new(inbound)).await;
        let told = Box::pin(told.expect("it is opened").into_inner());
        let (credential, session) = (String::new(), None);
        let mut stream = Self { mailbox, told, credential, session, newest: 0, number: 0 };
        let mut heard = Heartbeat::default();
        while heard.end.is_none() && heard.desired.is_empty() {
            stream.take(&mut heard).await;
        }
        if let Some(welcome) = &heard.welcome {
            stream.credential.clone_from(&welcome.session_credential);
            stream.session = Some(signer.verify(&stream.credential).expect("it is signed"));
        }
        (stream, heard)
    }

    async fn take(&mut self, heard: &mut Heartbeat) {
        heard.take(self.told.next().await);
        self.newest = heard.desired.last().map_or(self.newest, |desired| desired.generation);
    }

    /// Says what is, and hears what is told until that was done.
    pub(super) async fn say(&mut self, said: &Observed, heard: &mut Heartbeat) {
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
            applied_generation: said.echo,
            leases: said.phases.iter().map(lease).collect(),
            number: self.number,
            ..pb::Observed::default()
        };
        self.mailbox.say(pb::synchronize_request::Message::Observed(observed));
        let mailbox = self.mailbox.clone();
        let all_heard = mailbox.all_heard();
        tokio::pin!(all_heard);
        while heard.end.is_none() {
            tokio::select! {
                biased;
                () = self.take(heard) => {}
                () = &mut all_heard => break,
            }
        }
    }

    /// Hears what is told until that is all that its replica knows.
    pub(super) async fn hear(&mut self, heard: &mut Heartbeat, attended: &DesiredStates) {
        let session = self.session.clone().expect("it was let in");
        let known = attended.subscribe(session.worker).news().map(|news| news.known);
        let generation = match known {
            None => 0,
            Some(known) if known.is_spoken_for_by(&session) => known.generation.unsigned_abs(),
            // Nothing more is told but that.
            Some(_) => u64::MAX,
        };
        let hears = async {
            while heard.end.is_none() && self.newest < generation {
                self.take(heard).await;
            }
        };
        let hears = tokio::time::timeout(PATIENCE, hears).await;
        hears.unwrap_or_else(|_| panic!("nothing newer is told than {heard:?}, and {generation} is known"));
    }
}
