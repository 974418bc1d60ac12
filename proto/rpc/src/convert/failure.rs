//! Failures. Reading one never fails: a waiter must hear of a failure even when a newer peer words it differently.

use ronde_wire::{Cause, Failure, Rank, SidecarIndex, TensorName};

use crate::v1;

impl From<Cause> for v1::Cause {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Mismatch => Self::Mismatch,
            Cause::Refused => Self::Refused,
            Cause::RankLost => Self::RankLost,
            Cause::SidecarLost => Self::SidecarLost,
            Cause::ShutDown => Self::ShutDown,
            Cause::TimedOut => Self::TimedOut,
            Cause::Bug => Self::Bug,
            // Read back as a bug, with the reason kept.
            _ => Self::Unspecified,
        }
    }
}

impl From<&Failure> for v1::Failure {
    fn from(failure: &Failure) -> Self {
        Self {
            cause: v1::Cause::from(failure.cause).into(),
            rank: failure.rank.map(|rank| rank.0),
            sidecar: failure.sidecar.map(|sidecar| sidecar.0),
            tensor: failure.tensor.clone().map(String::from),
            reason: failure.reason.clone(),
        }
    }
}

impl From<v1::Failure> for Failure {
    /// An unknown cause becomes [`Cause::Bug`]; a name that is none is left out; a long reason is cut.
    fn from(message: v1::Failure) -> Self {
        let mut failure = Self::new(cause_from(message.cause), message.reason);
        failure.rank = message.rank.map(Rank);
        failure.sidecar = message.sidecar.map(SidecarIndex);
        failure.tensor = message.tensor.and_then(|name| TensorName::new(name).ok());
        failure
    }
}

fn cause_from(number: i32) -> Cause {
    match v1::Cause::try_from(number) {
        Ok(v1::Cause::Mismatch) => Cause::Mismatch,
        Ok(v1::Cause::Refused) => Cause::Refused,
        Ok(v1::Cause::RankLost) => Cause::RankLost,
        Ok(v1::Cause::SidecarLost) => Cause::SidecarLost,
        Ok(v1::Cause::ShutDown) => Cause::ShutDown,
        Ok(v1::Cause::TimedOut) => Cause::TimedOut,
        Ok(v1::Cause::Bug | v1::Cause::Unspecified) | Err(_) => Cause::Bug,
    }
}
