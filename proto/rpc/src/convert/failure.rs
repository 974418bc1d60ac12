//! Conversion of failures. Parsing never fails: the caller must learn of a failure even if a newer peer encodes it
//! differently.

use std::sync::Arc;

use ronde_wire::{Call, Cause, Exit, Failure, Rank, Record, SidecarIndex, TensorName};

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
            // The receiver parses this as a bug and keeps the reason.
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
            record: failure.record.as_deref().map(v1::Record::from),
        }
    }
}

impl From<&Record> for v1::Record {
    fn from(record: &Record) -> Self {
        let exit = |exit| match exit {
            Exit::Code(code) => v1::record::Exit::ExitCode(code),
            Exit::Signal(signal) => v1::record::Exit::Signal(signal),
            Exit::OutOfMemory => v1::record::Exit::OutOfMemory(true),
        };
        let call = |call: &Call| v1::Call {
            collective: call.collective.clone(),
            operation: call.operation.clone().into(),
            site: call.site.clone(),
            age_ms: call.age_ms,
        };
        Self {
            rank: record.rank.0,
            host: record.host.clone(),
            pid: record.pid,
            exit: record.exit.map(exit),
            last_call: record.last_call.as_ref().map(call),
            stderr_tail: record.stderr_tail.clone(),
        }
    }
}

impl From<v1::Record> for Record {
    /// Texts are truncated; a call without a valid name is omitted.
    fn from(message: v1::Record) -> Self {
        let exit = |exit| match exit {
            v1::record::Exit::ExitCode(code) => Some(Exit::Code(code)),
            v1::record::Exit::Signal(signal) => Some(Exit::Signal(signal)),
            v1::record::Exit::OutOfMemory(happened) => happened.then_some(Exit::OutOfMemory),
        };
        let call = |call: v1::Call| {
            let operation = TensorName::new(call.operation).ok()?;
            Some(Call { collective: call.collective, operation, site: call.site, age_ms: call.age_ms })
        };
        let record = Self {
            rank: Rank(message.rank),
            host: message.host,
            pid: message.pid,
            exit: message.exit.and_then(exit),
            last_call: message.last_call.and_then(call),
            stderr_tail: message.stderr_tail,
        };
        record.within_limits()
    }
}

impl From<v1::Failure> for Failure {
    /// An unknown cause becomes [`Cause::Bug`]; an invalid name is omitted; a long reason is truncated.
    fn from(message: v1::Failure) -> Self {
        let mut failure = Self::new(cause_from(message.cause), message.reason);
        failure.rank = message.rank.map(Rank);
        failure.sidecar = message.sidecar.map(SidecarIndex);
        failure.tensor = message.tensor.and_then(|name| TensorName::new(name).ok());
        failure.record = message.record.map(|record| Arc::new(record.into()));
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
