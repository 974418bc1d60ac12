//! [`Inbox`]: the commands of the lane of operations in device memory, which it also receives while NCCL works.

use std::collections::VecDeque;

use ronde_wire::{Epoch, Seq};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;

use crate::operation::lanes::{ExecuteCommand, GpuCommand, LaneCommand};

/// Commands in order, but for one kind: deliveries come first, because each completes an operation and frees what it holds. None
/// of them depends on a command before it, since the lane has performed the first part of the operation already.
pub(super) struct Inbox {
    commands: mpsc::Receiver<LaneCommand>,
    /// Commands that were received during an operation. The queue has room again for as many, but the operations that the
    /// sidecar has admitted bound both together: each has at most one command in them.
    backlog: VecDeque<LaneCommand>,
}

/// What there is to do.
pub(super) enum Received {
    /// This.
    Command(LaneCommand),
    /// Nothing any more: the sidecar ends.
    Closed,
}

impl Inbox {
    /// An inbox of these commands.
    pub(super) fn new(commands: mpsc::Receiver<LaneCommand>) -> Self {
        Self { commands, backlog: VecDeque::new() }
    }

    /// The next command. Waits for one.
    pub(super) fn next(&mut self) -> Received {
        self.receive();
        let next = self.backlog_next().or_else(|| self.commands.blocking_recv());
        next.map_or(Received::Closed, Received::Command)
    }

    /// Receives commands while a collective of an epoch runs. A command that only drops its operation does not end it: all its
    /// participants are GPUs of this host, whose kernels run already, so it completes by itself, and the communicators remain.
    ///
    /// # Errors
    /// When the epoch or the sidecar ends; the text is the reason.
    pub(super) fn check(&mut self, epoch: Epoch) -> Result<(), String> {
        self.receive();
        if self.ends_epoch(epoch) { Err("its epoch or the sidecar ends".to_owned()) } else { Ok(()) }
    }

    /// Receives commands, and returns whether one of them drops an operation.
    pub(super) fn drops(&mut self, epoch: Epoch, seq: Seq) -> bool {
        self.receive();
        self.ends_epoch(epoch)
            || self.backlog.iter().any(|command| match command {
                LaneCommand::Execute(ExecuteCommand::Cancel(of, _, dropped)) => *of == epoch && dropped.contains(&seq),
                _ => false,
            })
    }

    fn ends_epoch(&self, epoch: Epoch) -> bool {
        self.commands.is_closed()
            || self.backlog.iter().any(|command| match command {
                LaneCommand::Stop(_) => true,
                LaneCommand::Execute(ExecuteCommand::EpochEnd(ended)) => *ended == epoch,
                _ => false,
            })
    }

    fn receive(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.backlog.push_back(command),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return,
            }
        }
    }

    /// The first delivery that was received, or else the first command.
    fn backlog_next(&mut self) -> Option<LaneCommand> {
        let is_delivery = |command: &LaneCommand| matches!(command, LaneCommand::Gpu(GpuCommand::Deliver(..)));
        let at = self.backlog.iter().position(is_delivery).unwrap_or(0);
        self.backlog.remove(at)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const EPOCH: Epoch = Epoch(3);

    fn deliver(seq: u64) -> LaneCommand {
        LaneCommand::Gpu(GpuCommand::Deliver(EPOCH, Seq(seq)))
    }

    fn inbox(commands: Vec<LaneCommand>) -> (mpsc::Sender<LaneCommand>, Inbox) {
        let (sender, receiver) = mpsc::channel(16);
        for command in commands {
            sender.try_send(command).expect("there is room");
        }
        (sender, Inbox::new(receiver))
    }

    /// The commands that it gives until the sidecar ends, in words.
    fn given(mut inbox: Inbox, sender: mpsc::Sender<LaneCommand>) -> Vec<String> {
        drop(sender);
        let named = |received| match received {
            Received::Command(LaneCommand::Gpu(GpuCommand::Deliver(_, seq))) => Some(format!("deliver {}", seq.0)),
            Received::Command(LaneCommand::Execute(ExecuteCommand::EpochEnd(epoch))) => {
                Some(format!("end {}", epoch.0))
            }
            Received::Command(_) => Some("other".to_owned()),
            Received::Closed => None,
        };
        std::iter::from_fn(|| named(inbox.next())).collect()
    }

    #[test]
    fn deliveries_come_first_and_all_else_in_order() {
        let end = || ExecuteCommand::EpochEnd(EPOCH).into();
        let trace = || ExecuteCommand::Trace(true).into();
        let (sender, inbox) = inbox(vec![trace(), end(), deliver(7), trace(), deliver(8)]);
        assert_eq!(given(inbox, sender), ["deliver 7", "deliver 8", "other", "end 3", "other"]);
    }

    #[test]
    fn commands_that_drop_or_end_an_operation_are_found_before_their_turn() {
        let cancel = ExecuteCommand::Cancel(EPOCH, Seq(9), Arc::new([Seq(5), Seq(9)]));
        let (sender, mut inbox) = inbox(vec![ExecuteCommand::Trace(true).into(), cancel.into()]);
        assert!(!inbox.drops(EPOCH, Seq(4)));
        assert!(!inbox.drops(Epoch(2), Seq(5)), "an operation of another epoch");
        assert!(inbox.drops(EPOCH, Seq(5)));
        inbox.check(EPOCH).expect("a collective of an operation that is dropped completes");
        sender.try_send(ExecuteCommand::EpochEnd(EPOCH).into()).expect("there is room");
        assert!(inbox.drops(EPOCH, Seq(4)), "its epoch is over");
        inbox.check(EPOCH).expect_err("its epoch is over");
        inbox.check(Epoch(4)).expect("of the next epoch");
        drop(sender.clone());
        inbox.check(Epoch(4)).expect("another sender is left");
        assert_eq!(given(inbox, sender).len(), 3, "they are still performed in order");
    }

    #[test]
    fn operations_end_when_the_sidecar_does() {
        let (sender, mut inbox) = inbox(Vec::new());
        drop(sender);
        inbox.check(Epoch(4)).expect_err("the sidecar ends");
        assert!(inbox.drops(Epoch(4), Seq(1)));
    }
}
