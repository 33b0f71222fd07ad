//! Answers to another team: items of other teams must look as if they did not exist.

use rpc::Reason;

use super::{Accepted, Outcome, State, Violation, must};
use crate::model::operations::Trespass;

impl State {
    /// Checks the answer. No call of another team changes anything.
    pub(super) fn trespass(&self, tried: Trespass, outcome: &Outcome) -> Accepted {
        use Trespass as T;
        let refusal = match outcome {
            Outcome::Passed { learnt } => {
                let may_be_answered = matches!(
                    tried,
                    T::Locate(_) | T::AdoptBytes(_) | T::AskCache(_) | T::AskTask(_) | T::DeleteTask(_)
                );
                must!(may_be_answered, "another team may not");
                must!(!learnt, "another team learnt of it");
                return Ok(());
            }
            Outcome::Refused(refusal) => refusal,
            _ => return Err(Violation("no answer".to_owned())),
        };
        let is_silent = |worker: u8| self.workers[usize::from(worker)].silent;
        let listed = match tried {
            T::Get(_) | T::Undelete(_) | T::Drop(..) | T::Seal(..) | T::PutType(_) => {
                Reason::ArtifactNotFound
            }
            T::Plan(_, worker) if is_silent(worker) && refusal.is(Reason::NotAttended) => Reason::NotAttended,
            T::Plan(..) => Reason::ArtifactNotFound,
            T::Pin(_) | T::Prepare(..) => Reason::InputUnavailable,
            T::RemoveOwner(..) => Reason::ArtifactNotFound,
            T::AddOwner(..) => Reason::OwnerEnded,
            T::EndBuild(_) => Reason::BuildExists,
            T::DeleteBuild(_) => Reason::BuildNotFound,
            T::RenewClaim(_) | T::PutCache(..) => Reason::ClaimLost,
            T::UseCache(_) | T::DeleteCache(_) | T::PublishTask(..) => Reason::CacheNotFound,
            T::Locate(_) | T::AdoptBytes(_) | T::AskCache(_) | T::AskTask(_) | T::DeleteTask(_) => {
                return Err(Violation("there is nothing in its way".to_owned()));
            }
        };
        must!(refusal.is(listed), "it is no {listed}");
        Ok(())
    }
}
