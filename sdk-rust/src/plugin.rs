//! Checks the plugin of an operation before the operation takes a name.

use ronde_wire::{Codec, Collective, PluginCall, PluginValue, ReduceOp, limits};

use crate::error::Error;
use crate::operation::Operation;

/// The codec of an operation's request, after a check of its plugin.
///
/// # Errors
/// [`Error::Argument`] for a plugin on an operation that takes none, a missing plugin, and an invalid one.
pub(crate) fn checked_codec(operation: &Operation<'_>) -> Result<Codec, Error> {
    let Operation { collective, codec, plugin, .. } = operation;
    let reduces = collective.reduce_op() == Some(ReduceOp::Plugin);
    let Some(plugin) = plugin else {
        return match (reduces, codec) {
            (true, _) => refused("a reduction by a plugin names no plugin; use ReduceOptions::reduced_by"),
            (false, Codec::Plugin) => refused("a plugin codec names no plugin; use ReduceOptions::encoded_by"),
            (false, codec) => Ok(*codec),
        };
    };
    let called = &plugin.name;
    let Collective::AllReduce { op } = collective else {
        let kind = collective.name();
        return refused(format!("{kind} takes no plugin, but was given {called}; only ALLREDUCE does"));
    };
    check_call(plugin)?;
    match (op, codec) {
        (ReduceOp::Plugin, Codec::None) => Ok(Codec::None),
        (ReduceOp::Plugin, codec) => {
            refused(format!("codec {codec} with a reduction by plugin {called}: a plugin reduces uncompressed values"))
        }
        (ReduceOp::Sum | ReduceOp::Average, Codec::None | Codec::Plugin) => Ok(Codec::Plugin),
        (ReduceOp::Sum | ReduceOp::Average, codec) => {
            refused(format!("codec {codec} and plugin {called} as a codec; leave one of them out"))
        }
        (op, _) => {
            let op = op.name();
            refused(format!(
                "plugin {called} as a codec with {op}: decoded values are summed; use Sum or Average, or \
                 ReduceOptions::reduced_by if it reduces"
            ))
        }
    }
}

/// Rejects a call that no sidecar could accept.
fn check_call(PluginCall { name, parameters }: &PluginCall) -> Result<(), Error> {
    let (plain, version) = name.split_once('@').map_or((name.as_str(), None), |(name, version)| (name, Some(version)));
    let is_name = within(plain, limits::PLUGIN_NAME_BYTES_MAX, |c| matches!(c, 'a'..='z' | '0'..='9' | '-'));
    let is_version = version.is_none_or(|version| {
        within(version, limits::PLUGIN_VERSION_BYTES_MAX, |c| c.is_ascii_alphanumeric() || ".+-".contains(c))
    });
    if !is_name || !is_version {
        return refused(format!(
            "{name:?} is no name of a plugin: it is NAME or NAME@VERSION, the name of 1 to {} of a-z 0-9 -, the version of 1 to {} of \
             A-Z a-z 0-9 . + -",
            limits::PLUGIN_NAME_BYTES_MAX,
            limits::PLUGIN_VERSION_BYTES_MAX
        ));
    }
    let (given, max) = (parameters.len(), limits::PLUGIN_PARAMETERS_MAX);
    if given > max {
        return refused(format!("plugin {name} with {given} parameters; a plugin has at most {max}"));
    }
    for (index, (parameter, value)) in parameters.iter().enumerate() {
        if parameters[..index].iter().any(|(earlier, _)| earlier == parameter) {
            return refused(format!("plugin {name}: parameter {parameter} is given twice"));
        }
        check_value(name, parameter, value)?;
    }
    Ok(())
}

fn check_value(name: &str, parameter: &str, value: &PluginValue) -> Result<(), Error> {
    let max = limits::PLUGIN_NAME_BYTES_MAX;
    if !(1..=max).contains(&parameter.len()) {
        return refused(format!("plugin {name}: {parameter:?} is no name of a parameter, which has 1 to {max} bytes"));
    }
    match value {
        PluginValue::Float(value) if !value.is_finite() => {
            refused(format!("plugin {name}: parameter {parameter} is {value}, but must be finite"))
        }
        PluginValue::Choice(choice) if choice.len() > max => {
            let given = choice.len();
            refused(format!(
                "plugin {name}: parameter {parameter} is a text of {given} bytes; a choice has at most {max}"
            ))
        }
        _ => Ok(()),
    }
}

fn within(text: &str, max: usize, allowed: impl Fn(char) -> bool) -> bool {
    (1..=max).contains(&text.len()) && text.chars().all(allowed)
}

fn refused<T>(reason: impl Into<String>) -> Result<T, Error> {
    Err(Error::argument(reason))
}
